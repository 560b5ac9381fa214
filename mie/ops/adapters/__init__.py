"""Low-rank changes of matrices: LoRA adapters, and the contract of backends that have them."""
