"""Refuse the names of vLLM's package of LoRA adapters, which mie does not have."""
