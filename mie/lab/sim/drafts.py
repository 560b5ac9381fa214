"""Draft tokens of simulated texts, with a given share of right drafts."""

from __future__ import annotations

from collections.abc import Sequence as Items

from mie.config.speculation import SpeculativeConfig
from mie.lab.sim.costs import Costs, decode_work
from mie.lab.workload import text_key, text_token
from mie.sched.sequence import Sequence
from mie.speculate.rule import Record, RowCosts, Rule

RIGHT_PERCENT = 60
"""The default share of right drafts, in percent."""

_RUN = 4  # simulated texts have no runs of equal tokens, so every guess counts as after this many


class SimDrafter:
    """Has the text of each choice, and spoils drafts so that a share is right.

    Whether the draft at a position is right depends on the choice and the position alone.
    """

    def __init__(
        self, config: SpeculativeConfig, costs: Costs, vocab_size: int, right_percent: int
    ) -> None:
        """``costs`` give the time of rows, for the rule that chooses the number of drafts."""
        self._most, self._vocab_size = config.num_speculative_tokens, vocab_size
        self._right_percent = right_percent
        self._rule = Rule(row_costs(costs)) if config.adaptive else None
        self._records: dict[Sequence, Record] = {}

    def may_draft(self, seq: Sequence) -> bool:
        """Return True: a text goes on."""
        return True

    def propose(self, seq: Sequence, most: int, num_rows: int, num_tokens: int) -> Items[int]:
        """Return the next tokens of the text, some of them spoiled."""
        count = min(most, self._most)
        if self._rule:
            record = self._records.setdefault(seq, Record())
            count = self._rule.length(record, _RUN, count, num_rows, num_tokens)
        key, first = text_key(*seq.request.draw_key, seq.index), seq.num_tokens
        return [self._guess(key, position) for position in range(first, first + count)]

    def _guess(self, key: int, position: int) -> int:
        is_right = text_token(key ^ 1, position, 100) < self._right_percent
        token_id = text_token(key, position, self._vocab_size)
        return token_id if is_right else (token_id + 1) % self._vocab_size

    def observe(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Record how many drafts of a step were right."""
        if self._rule:
            self._rule.learn(self._records[seq], num_drafts, num_accepted)

    def end(self, seq: Sequence) -> None:
        """Drop a sequence that has ended."""
        self._records.pop(seq, None)

    def forget(self) -> None:
        """Do nothing: no text is kept."""


def row_costs(costs: Costs) -> RowCosts:
    """Return the time of steps of 1, 2, … rows, relative to the first, without any context."""
    times = [costs.step_ns(decode_work(count, 0, None)) for count in range(1, 257)]
    return RowCosts([time / times[0] for time in times])
