"""Guess the next tokens of running sequences by lookup."""

from __future__ import annotations

from collections.abc import Sequence as Items
from weakref import WeakKeyDictionary

from mie.config.speculation import SpeculativeConfig
from mie.sched.sequence import Request, Sequence
from mie.speculate.answers import Answers
from mie.speculate.history import BREAK, History
from mie.speculate.lookup import Guess, continued, most_frequent
from mie.speculate.rule import Record, RowCosts, Rule


class _State:
    """The tokens of a sequence, and how well they were guessed."""

    def __init__(self, width: int, seq: Sequence, longest: int) -> None:
        self.record = Record()
        self.history = History(width)
        request = seq.request
        if request.prediction:  # it follows the prompt's last tokens, as the answer does
            last = request.token_ids[-longest:]
            self.history.extend([*last, *request.prediction, BREAK])
        self._num_other = len(self.history.token_ids)

    def catch_up(self, seq: Sequence) -> None:
        """Append the new tokens of the sequence."""
        num_known = len(self.history.token_ids) - self._num_other
        self.history.extend(seq.token_ids[num_known:])


class LookupDrafter:
    """Guesses from a sequence's own tokens, from its prediction, and from finished answers."""

    def __init__(self, config: SpeculativeConfig, costs: RowCosts, most_tokens: int) -> None:
        """``most_tokens`` limits the tokens of finished answers that are kept."""
        self._config = config
        self._rule = Rule(costs) if config.adaptive else None
        is_suffix = config.method == "suffix"
        self._longest = (
            config.suffix_decoding_max_tree_depth if is_suffix else config.prompt_lookup_max
        )
        self._width = config.prompt_lookup_min
        most_answers = config.suffix_decoding_max_cached_requests if is_suffix else 0
        self._answers = Answers(self._width, most_answers, most_tokens)
        self._states: WeakKeyDictionary[Request, dict[int, _State]] = WeakKeyDictionary()

    def may_draft(self, seq: Sequence) -> bool:
        """Return whether the sequence's last tokens occurred before."""
        return bool(self._guess(self._state(seq), seq, 1).token_ids)

    def propose(self, seq: Sequence, most: int, num_rows: int, num_tokens: int) -> Items[int]:
        """Return at most ``most`` tokens that may follow the sequence's tokens."""
        state = self._state(seq)
        most = min(most, self._config.num_speculative_tokens)
        guess = self._guess(state, seq, most)
        count = len(guess.token_ids)
        if count and self._rule:
            record = state.record
            count = self._rule.length(record, guess.num_equal, count, num_rows, num_tokens)
        return guess.token_ids[:count]

    def _guess(self, state: _State, seq: Sequence, most: int) -> Guess:
        last = seq.token_ids[-self._longest :]
        if self._config.method == "ngram":
            return continued(state.history, last, self._longest, most)
        histories = [state.history, *self._answers.of(seq.request.cache_salt)]
        min_share = self._config.suffix_decoding_min_token_prob
        return most_frequent(histories, last, self._longest, most, min_share)

    def _state(self, seq: Sequence) -> _State:
        states = self._states.setdefault(seq.request, {})
        state = states.get(seq.index)
        if state is None:
            state = states[seq.index] = _State(self._width, seq, self._longest)
        state.catch_up(seq)
        return state

    def observe(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Record how many drafts of a step were right."""
        if self._rule:
            self._rule.learn(self._state(seq).record, num_drafts, num_accepted)

    def end(self, seq: Sequence) -> None:
        """Drop a sequence that has ended, and keep its answer."""
        self._states.get(seq.request, {}).pop(seq.index, None)
        if seq.finish_reason in ("stop", "length"):
            last = seq.request.token_ids[-self._longest :]
            self._answers.add([*last, *seq.output_ids], seq.request.cache_salt)

    def forget(self) -> None:
        """Drop the finished answers."""
        self._answers.clear()
