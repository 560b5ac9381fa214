"""Give a loaded model's configuration the names that programs for vLLM read."""

from __future__ import annotations

from dataclasses import dataclass

from mie.base.refusals import refuses_names
from mie.model.config import ModelConfig


@refuses_names
@dataclass(frozen=True, kw_only=True)
class LoadedModelConfig(ModelConfig):
    """Sizes and flags of a model, and the context that an engine gives it."""

    max_model_len: int
    """Maximum number of tokens in a prompt and its answer together."""

    @classmethod
    def of(cls, model: ModelConfig, max_model_len: int) -> LoadedModelConfig:
        """Return the configuration of a model whose engine has this context."""
        return cls(**vars(model), max_model_len=max_model_len)

    def get_vocab_size(self) -> int:
        """Return the number of token ids."""
        return self.vocab_size

    def get_hidden_size(self) -> int:
        """Return the size of hidden states."""
        return self.hidden_size

    def get_head_size(self) -> int:
        """Return the size of an attention head."""
        return self.head_dim
