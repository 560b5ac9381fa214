"""Refuse the names of vLLM's module of requests with LoRA adapters."""

from mie.base.refusals import missing


def __getattr__(name: str) -> object:
    raise missing("vllm.lora.request", name)
