"""Log-probabilities in the shapes of OpenAI's two generation routes.

The values are the model's own, before temperature, penalties and any other edit of the logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mie.frontend.outputs import ranked
from mie.sched.result import TokenLogprobs
from mie.text.detokenizer import Detokenizer
from mie.text.token_bytes import TokenBytes
from mie.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""The logarithm of a probability of zero, in place of the infinity that JSON lacks."""


class LogprobWriter:
    """Spells tokens, and writes their log-probabilities."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        num_top: int = 0,
        as_ids: bool = False,
        skips_special: bool = True,
    ) -> None:
        """Spell tokens as ``token_id:7`` if they are to be ``as_ids``, or if nothing can spell
        them."""
        self._tokenizer = tokenizer
        self._bytes = None if tokenizer is None else TokenBytes(tokenizer)
        self._as_ids = as_ids or tokenizer is None
        self._num_top = num_top
        self._skips_special = skips_special

    def spelled(self, token_id: int) -> str:
        """Return a token's text, or ``bytes:\\xe2`` for a part of a character, as OpenAI does."""
        if self._as_ids or self._bytes is None:
            return f"token_id:{token_id}"
        data = self._bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def offsets(self, prompt_token_ids: Sequence[int]) -> TextOffsets:
        """Return the counter of where tokens begin in a text that continues a prompt's."""
        return TextOffsets(self._tokenizer, prompt_token_ids, self._skips_special)

    def completion(
        self, token_ids: Sequence[int], rows: Sequence[TokenLogprobs | None], offsets: TextOffsets
    ) -> dict[str, Any]:
        """Return the ``logprobs`` of a completion; the first token of a prompt has no row.

        The lists are iterators: see `mie.serve.written`.
        """
        assert len(token_ids) == len(rows), "each token has its row"
        return {
            "tokens": map(self.spelled, token_ids),
            "token_logprobs": (None if row is None else finite(row.logprobs[0]) for row in rows),
            "top_logprobs": (None if row is None else self._top(row) for row in rows),
            "text_offset": offsets.add(token_ids),
        }

    def chat(self, rows: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """Return the ``logprobs`` of a chat's choice, with an iterator in place of the list."""
        return {"content": self.entries(rows), "refusal": None}

    def entries(self, rows: Iterable[TokenLogprobs]) -> Iterator[dict[str, Any]]:
        """Yield the log-probabilities of a chat's tokens."""
        return map(self._entry, rows)

    def prompt(self, rows: Iterable[TokenLogprobs | None]) -> Iterator[Any]:
        """Yield ``prompt_logprobs`` in vLLM's shape."""
        for row in rows:
            yield row and {
                str(token_id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": self.spelled(token_id),
                }
                for token_id, (logprob, rank) in ranked(row).items()
            }

    def _top(self, row: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in zip(row.token_ids, row.logprobs, strict=True):
            top.setdefault(self.spelled(token_id), finite(logprob))
        return top

    def _entry(self, row: TokenLogprobs) -> dict[str, Any]:
        found = [(token_id, logprob) for token_id, (logprob, _) in ranked(row).items()]
        top = sorted(found, key=lambda item: -item[1])[: self._num_top]
        return {**self._token(*found[0]), "top_logprobs": [self._token(*each) for each in top]}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = b"" if self._bytes is None else self._bytes(token_id)
        return {
            "token": self.spelled(token_id) if self._as_ids else data.decode(errors="replace"),
            "logprob": finite(logprob),
            "bytes": list(data),
        }


class TextOffsets:
    """Counts where each token of a text begins, in characters of the text that the client gets."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], skips_special: bool
    ) -> None:
        self._stream = None
        if tokenizer is not None:
            self._stream = Detokenizer(tokenizer, prompt_token_ids, skips_special)
        self._length = 0

    def add(self, token_ids: Sequence[int]) -> Iterator[int]:
        """Yield where the next tokens begin."""
        for token_id in token_ids:
            yield self._length
            if self._stream is not None:
                self._length += len(self._stream.add([token_id]))


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can write."""
    return logprob if logprob > LOWEST else LOWEST
