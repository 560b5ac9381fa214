"""Compute guesses of the next tokens in a step, and keep the guesses that the model draws too.

A decode with drafts is a chunk: the sequence's last token and the drafts, with logits for each.
Every row of logits draws the token that it would draw without drafts. A draft is kept if it is
equal, and the first other token replaces the rest. So drafts change the number of steps, and never
a token. docs/speculation.md has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from mie.base.stats.speculation import SpeculationStats
from mie.memory.manager import KVCacheManager
from mie.memory.table import Emit
from mie.sched.draft import StepDraft
from mie.sched.plan import Chunk
from mie.sched.result import ChunkResult
from mie.sched.rows import RunningRows
from mie.sched.sequence import Sequence


def most_sampled(max_num_seqs: int) -> int:
    """Return how many tokens a step with drafts may draw. It limits the memory of logits."""
    return max(max_num_seqs, min(64, 16 * max_num_seqs))


class Drafter(Protocol):
    """Guesses the next tokens of sequences. A guess may be wrong, and is never trusted."""

    def may_draft(self, seq: Sequence) -> bool:
        """Return whether the next steps may get drafts for a sequence."""

    def propose(self, seq: Sequence, most: int, num_rows: int, num_tokens: int) -> Items[int]:
        """Return at most ``most`` tokens that may follow the sequence's tokens.

        Without them, the step computes ``num_rows`` tokens, and draws ``num_tokens`` new ones.
        """

    def observe(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Record how many drafts of a step were kept. The sequence has the kept ones already."""

    def end(self, seq: Sequence) -> None:
        """Drop the data of a sequence that has ended."""

    def forget(self) -> None:
        """Drop all data from sequences that have ended."""


class Speculation:
    """Adds drafts to steps, and settles the drafts of each step."""

    def __init__(
        self,
        drafter: Drafter,
        rows: RunningRows,
        manager: KVCacheManager,
        emit: Emit,
        max_num_seqs: int,
    ) -> None:
        self.drafter = drafter
        self._most_sampled = most_sampled(max_num_seqs)
        self.stats = SpeculationStats()
        self._rows, self._manager, self._emit = rows, manager, emit

    def may_draft(self) -> bool:
        """Return whether any running sequence may get drafts in the next step."""
        return any(map(self.drafter.may_draft, self._rows.running))

    def add_drafts(self, step: StepDraft) -> None:
        """Add drafts to decodes that are planned, within the tokens and blocks that are left.

        Nothing waits for drafts, and no sequence is preempted for them.
        """
        num_tokens = len(step.decodes) + sum([len(chunk.choices) for chunk in step.chunks])
        num_rows = len(step.decodes) + sum([len(chunk.token_ids) for chunk in step.chunks])
        num_left, verifies = self._most_sampled - num_tokens, []
        for row in sorted(step.decodes):
            seq = self._rows.by_row[row]
            most = min(num_left, step.budget.most(seq.request))
            drafts = self._drafts(seq, most, num_rows, num_tokens)
            if drafts:
                step.decodes.remove(row)
                verifies.append(seq.with_drafts(drafts))
                step.budget.take(seq.request, len(drafts))
                num_rows, num_left = num_rows + len(drafts), num_left - len(drafts)
        step.chunks[:0] = verifies  # before prompts, like decodes

    def _drafts(self, seq: Sequence, most: int, num_rows: int, num_tokens: int) -> Items[int]:
        """Return drafts for which there are slots. None of them ends the sequence."""
        table = seq.table
        assert table is not None
        most = min(most, seq.max_tokens - seq.num_tokens - 1)
        most = self._manager.chunk_limit(table, 1 + most) - 1
        if most < 1:
            return ()
        drafts = self.drafter.propose(seq, most, num_rows, num_tokens)
        ends = [at for at, token_id in enumerate(drafts) if token_id in seq.end_token_ids]
        drafts = drafts[: min([most, *ends])]
        if not drafts or not self._manager.reserve_drafts(table, seq.num_tokens + len(drafts)):
            return ()
        return drafts

    def settle(self, seq: Sequence, chunk: Chunk, yielded: ChunkResult) -> None:
        """Append the drafts that are kept, and release the slots of the others.

        The token after them is left to `Scheduler.update`.
        """
        assert seq.table is not None
        num_drafts, accepted = chunk.num_drafts, yielded.token_ids[:-1]
        for token_id, logprobs in zip(accepted, yielded.logprobs, strict=False):
            if logprobs is not None:
                seq.logprobs.append(logprobs)
            seq.token_ids.append(token_id)
        self._emit(("verify", seq.seq_id, chunk.start, num_drafts, len(accepted)))
        is_whole = len(accepted) == num_drafts
        self._manager.settle(seq.table, seq.num_tokens, is_whole=is_whole)
        self.stats.add(num_drafts, len(accepted))
        metrics = seq.request.metrics
        metrics.num_draft_tokens += num_drafts
        metrics.num_accepted_tokens += len(accepted)
        self.drafter.observe(seq, num_drafts, len(accepted))
