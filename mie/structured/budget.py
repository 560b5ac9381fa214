"""End the reasoning of an output after a number of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mie.config.params.structured import StructuredOutputsParams
from mie.structured.matcher import Matcher
from mie.structured.structural_tags import opening_tag

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from mie.structured.grammars import Grammar


@dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """The number of tokens that free text between two tags may have."""

    open: bytes
    """The tag before the text; nothing if the text begins the output."""
    close: bytes
    closing_ids: Sequence[int]
    """The tokens that write the closing tag."""
    num_tokens: int
    bytes_of: Callable[[int], bytes]
    """Returns the text of a token."""


def budget_of(params: StructuredOutputsParams, tokens: LLTokenizer) -> Budget | None:
    """Return the budget of a structural tag that was compiled, or None if it has none."""
    if params.structural_tag is None:
        return None
    opening = opening_tag(json.loads(str(params.structural_tag)))
    if opening is None or opening.tag["content"].get("max_tokens") is None:
        return None
    tag = opening.tag

    def bytes_of(token_id: int) -> bytes:
        return tokens.decode_bytes([token_id])

    def ids_of(literal: Any) -> list[int]:
        if isinstance(literal, str):
            return tokens.tokenize_str(literal)
        return [literal["token"] if isinstance(literal, dict) else literal]

    end = tag["end"][0] if isinstance(tag["end"], list) else tag["end"]
    closing_ids = ids_of(end)
    begun = [*opening.before, tag["begin"]]
    return Budget(
        open=b"".join(bytes_of(each) for literal in begun for each in ids_of(literal)),
        close=b"".join(map(bytes_of, closing_ids)),
        closing_ids=closing_ids,
        num_tokens=tag["content"]["max_tokens"],
        bytes_of=bytes_of,
    )


class BudgetedMatcher(Matcher):
    """Writes the closing tag once the tokens of a budget are used up."""

    def __init__(
        self, grammar: Grammar, eos_token_ids: Sequence[int], vocab_size: int, budget: Budget
    ) -> None:
        super().__init__(grammar, eos_token_ids, vocab_size)
        self._count = _Count(budget)
        self._earlier_counts: list[_Count] = []

    def _forced(self) -> int | None:
        """Return the token of the closing tag that comes next, if its time has come.

        A character with written first bytes is completed before the tag.
        """
        forced = self._count.forced
        return forced if forced is not None and super().allows(forced) else None

    def determined(self) -> int | None:
        forced = self._forced()
        return super().determined() if forced is None else forced

    def mask(self) -> bytes:
        forced = self._forced()
        return super().mask() if forced is None else self._mask_of(forced)

    def allows(self, token_id: int) -> bool:
        forced = self._forced()
        return super().allows(token_id) if forced is None else token_id == forced

    def accept(self, token_id: int) -> None:
        super().accept(token_id)
        self._earlier_counts.append(copy(self._count))
        self._count.add(token_id)

    def validate(self, token_ids: Sequence[int]) -> int:
        num_valid = super().validate(token_ids)
        count = copy(self._count)
        for place, token_id in enumerate(token_ids[:num_valid]):
            if count.forced not in (None, token_id):
                return place
            count.add(token_id)
        return num_valid

    def rollback(self, num_tokens: int) -> None:
        super().rollback(num_tokens)
        if num_tokens > 0:
            self._count = self._earlier_counts[-num_tokens]
            del self._earlier_counts[-num_tokens:]


class _Count:
    """Counts the tokens between two tags."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._text = b""  # the end of the text that may belong to a tag
        self._is_open = not budget.open
        self._is_over = False
        self._num_tokens = 0
        self._num_closing = 0

    @property
    def forced(self) -> int | None:
        """The token of the closing tag that must come next, or None if any may come."""
        if self._is_over or not self._is_open or self._num_tokens < self._budget.num_tokens:
            return None
        return self._budget.closing_ids[self._num_closing]

    def add(self, token_id: int) -> None:
        """Count a token."""
        if self._is_over:
            return
        if token_id == self.forced:
            self._num_closing += 1
        elif self._is_open:
            self._num_tokens += 1
        self._text += self._budget.bytes_of(token_id)
        if not self._is_open:
            begun = self._text[: len(self._budget.open)]
            self._is_open = begun == self._budget.open
            self._is_over = not self._budget.open.startswith(begun)
            self._text = self._text[len(begun) :] if self._is_open else self._text
        close = self._budget.close
        if self._is_open:
            self._is_over = close in self._text or self._num_closing == len(
                self._budget.closing_ids
            )
            self._text = self._text[-len(close) :]
