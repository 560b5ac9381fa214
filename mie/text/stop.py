"""Find stop strings in a text that arrives in pieces."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from mie.errors import ConfigError


class StopStrings:
    """Passes text on until a stop string is complete, and holds back what may begin one.

    The first stop string to be complete wins. If two end at the same character, the longer one
    wins. The output never depends on how the text was cut into pieces. Each character costs the
    same, however many stop strings there are. A `fork` shares the automaton.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        if isinstance(stop, str):
            raise ConfigError(f"stop must be a list of strings, got the string {stop!r}")
        if "" in stop:
            raise ConfigError("a stop string must not be empty: it would match everywhere")
        self._automaton = _Automaton(stop) if stop else None
        self._state = 0
        self._include = include_stop_str_in_output
        self._held = ""
        self._stopped = False

    def add(self, text: str, exempt: int = 0) -> tuple[str, str | None]:
        """Return the text to pass on now, and the stop string that ended it or None.

        A stop string that ends within the first ``exempt`` characters of ``text`` does not count,
        because ``min_tokens`` is not reached there. One that begins there and ends later counts.
        All text after a stop string is dropped.
        """
        if self._stopped:
            return "", None
        if self._automaton is None:
            return text, None
        held = len(self._held)
        self._held += text
        end, length = self._search(text, exempt)
        if length:
            return self._stop_at(held + end, length)
        return self._release(self._automaton.kept[self._state]), None

    def peek(self, text: str, exempt: int = 0) -> str | None:
        """Return the stop string that ``add`` would find, without changing anything."""
        return self.fork().add(text, exempt)[1] if text else None

    def flush(self) -> str:
        """Return the held-back text and start a new search."""
        self._state = 0
        return self._release(0)

    def fork(self) -> StopStrings:
        """Return an independent copy."""
        return copy.copy(self)

    def _search(self, text: str, exempt: int) -> tuple[int, int]:
        """Return the end of the first stop string in ``text`` and its length, or 0 and 0 if there
        is none."""
        assert self._automaton is not None
        after, found = self._automaton.after, self._automaton.found
        state = self._state
        for end, character in enumerate(text, start=1):
            state = after(state, character)
            if found[state] and end > exempt:
                return end, found[state]
        self._state = state
        return len(text), 0

    def _stop_at(self, end: int, length: int) -> tuple[str, str]:
        stop = self._held[end - length : end]
        text = self._held[: end if self._include else end - length]
        self._held = ""
        self._stopped = True
        return text, stop

    def _release(self, kept: int) -> str:
        cut = len(self._held) - kept
        text, self._held = self._held[:cut], self._held[cut:]
        return text


class _Automaton:
    """Tracks the longest prefix of any pattern that ends at the current character.

    A state stands for a prefix of a pattern. States are numbered by length, so that the state that
    a new one falls back to already exists. Source: Aho and Corasick, "Efficient string matching: an
    aid to bibliographic search", 1975.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self._shorter = [0]  # for each state, its longest proper suffix that is a state
        self.found = [0]  # Length of the longest pattern that ends at the state.
        self.kept = [0]  # How many last characters may begin a pattern.
        self._build(patterns)

    def after(self, state: int, character: str) -> int:
        """Return the state after ``state`` and ``character``."""
        found = self._next.get((state, character))
        while found is None and state:
            state = self._shorter[state]
            found = self._next.get((state, character))
        return found or 0

    def _build(self, patterns: Sequence[str]) -> None:
        reached = [(0, pattern) for pattern in set(patterns)]
        is_inner = {0}
        lengths = [0]
        length = 0
        while reached:
            length += 1
            reached = [
                (self._child(state, pattern[length - 1]), pattern) for state, pattern in reached
            ]
            lengths += [length] * (len(self.found) - len(lengths))
            for state, pattern in reached:
                if len(pattern) == length:
                    self.found[state] = length
                else:
                    is_inner.add(state)
            reached = [(state, pattern) for state, pattern in reached if len(pattern) > length]
        for state in range(1, len(self.found)):
            inner = state in is_inner
            self.kept.append(lengths[state] if inner else self.kept[self._shorter[state]])

    def _child(self, state: int, character: str) -> int:
        """Return the state for ``state`` plus one character, creating it if it is new."""
        child = self._next.get((state, character))
        if child is None:
            shorter = self.after(self._shorter[state], character) if state else 0
            child = len(self.found)
            self._next[state, character] = child
            self._shorter.append(shorter)
            self.found.append(self.found[shorter])
        return child
