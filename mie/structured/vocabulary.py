"""Give llguidance the tokens of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mie.errors import RequestError
from mie.structured.descriptions import library
from mie.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Vocabulary:
    """The tokens of a model. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``vocab_size`` is the number of logits, which may exceed the tokenizer's vocabulary."""
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self._indexed: LLTokenizer | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of llguidance's LLTokenizer, as JSON values."""
        return {
            "tokenizer": self._tokenizer.to_json(),
            "n_vocab": self.vocab_size,
            "eos_token": list(self.eos_token_ids),
        }

    def indexed(self) -> LLTokenizer:
        """Return the tokens as llguidance needs them. The first call may take seconds.

        Python's global lock is held meanwhile.

        Raises:
            RequestError: llguidance is not installed, or cannot use the tokenizer.
        """
        if self._indexed is None:
            if not self.eos_token_ids:
                raise RequestError(
                    "structured_outputs needs an end-of-text token, and the model has none (set "
                    "eos_token_id in its generation_config.json)"
                )
            try:
                self._indexed = library().LLTokenizer(**self.arguments())
            except ValueError as error:
                raise RequestError(
                    f"structured_outputs cannot use this tokenizer: {error}"
                ) from error
        return self._indexed
