"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from mie.errors import ConfigError


class StopStrings:
    """Passes a text on until a stop string is complete, holding back what may begin one.

    The first stop string to be complete wins, and of two that end together the longer: what comes
    out never depends on how the text was cut into pieces. Each character costs the same, however
    many stop strings there are. A `fork` shares what was built for them.
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
        """Return the text to pass on now, and the stop string that ended it, or None.

        A stop string that ends within the first ``exempt`` characters of ``text`` does not count
        (``min_tokens`` is not reached). One that begins there and ends later does. After a stop
        string everything is dropped.
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
        """Return the stop string that ``add`` would find; nothing changes."""
        return self.fork().add(text, exempt)[1] if text else None

    def flush(self) -> str:
        """Return what was held back, since nothing follows; the search starts anew."""
        self._state = 0
        return self._release(0)

    def fork(self) -> StopStrings:
        """Return a copy that goes its own way from here."""
        return copy.copy(self)

    def _search(self, text: str, exempt: int) -> tuple[int, int]:
        """Return where in ``text`` the first stop string ends, and its length; 0 when there is
        none."""
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
    """The longest beginning of any pattern that a text ends with, character by character.

    A state stands for a beginning of a pattern. States are numbered by length, so that what a new
    one falls back to is finished before it (Aho and Corasick, "Efficient string matching: an aid to
    bibliographic search", 1975).
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._next: dict[tuple[int, str], int] = {}
        self._shorter = [0]  # for each state, the longest other one that it ends with
        self.found = [0]  # the length of the longest pattern that the state ends with
        self.kept = [0]  # of the state's characters, how many may begin a pattern that is not over
        self._build(patterns)

    def after(self, state: int, character: str) -> int:
        """Return the state that follows ``state``."""
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
        """Return the state for ``state`` and one character more, made if it is new."""
        child = self._next.get((state, character))
        if child is None:
            shorter = self.after(self._shorter[state], character) if state else 0
            child = len(self.found)
            self._next[state, character] = child
            self._shorter.append(shorter)
            self.found.append(self.found[shorter])
        return child
