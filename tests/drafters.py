"""Draft tokens for tests: right ones, wrong ones, and both."""

import hashlib
from collections.abc import Mapping, Sequence

from mie.sched.sequence import Sequence as RunningSequence

KINDS = ("right", "wrong", "half", "random", "late", "mixed")
"""The kinds of `Oracle`: all right, all wrong, each right or wrong, any tokens, right up to a wrong
one, and another kind in each step."""


class Oracle:
    """Drafts from known outputs, spoiled in the way that ``kind`` says.

    ``outputs`` has the tokens of each choice by its sequence's id. Drafts depend on nothing but the
    sequence and its length, so an engine that runs twice gets the same ones.
    """

    def __init__(
        self,
        outputs: Mapping[tuple[int, int], Sequence[int]],
        kind: str,
        *,
        most: int = 5,
        vocab_size: int,
    ) -> None:
        assert kind in KINDS
        self._outputs, self._kind, self._most, self._vocab_size = outputs, kind, most, vocab_size
        self.num_drafts = self.num_accepted = 0
        self.ended: list[tuple[int, int]] = []

    def may_draft(self, seq: RunningSequence) -> bool:
        return _number("may", *seq.seq_id, seq.num_tokens) % 2 == 0

    def propose(
        self, seq: RunningSequence, most: int, num_rows: int, num_tokens: int
    ) -> Sequence[int]:
        assert most > 0
        assert num_tokens > 0
        assert num_rows > 0
        length = _number("length", *seq.seq_id, seq.num_tokens) % (self._most + 1)
        if self._kind == "right":
            length = self._most
        known = [*self._outputs.get(seq.seq_id, ())][seq.num_generated :][:length]
        kind = self._kind
        if kind == "mixed":
            kind = KINDS[_number("kind", *seq.seq_id, seq.num_tokens) % 5]
        drafts = [self._spoiled(kind, seq, i, token) for i, token in enumerate(known)]
        if kind == "random" or not known:  # drafts after the known end, too
            drafts += [self._any(seq, i) for i in range(len(drafts), length)]
        return drafts  # they may be more than ``most``

    def _spoiled(self, kind: str, seq: RunningSequence, index: int, token_id: int) -> int:
        wrong = (token_id + 1 + self._any(seq, index) % (self._vocab_size - 1)) % self._vocab_size
        if kind == "wrong":
            return wrong
        if kind == "half":
            return token_id if self._any(seq, index) % 2 else wrong
        if kind == "random":
            return self._any(seq, index)
        if kind == "late":
            return token_id if index < 2 else wrong
        return token_id

    def _any(self, seq: RunningSequence, index: int) -> int:
        return _number("any", *seq.seq_id, seq.num_tokens, index) % self._vocab_size

    def observe(self, seq: RunningSequence, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted

    def end(self, seq: RunningSequence) -> None:
        self.ended.append(seq.seq_id)

    def forget(self) -> None:
        pass


def _number(*values: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=4).digest(), "big")
