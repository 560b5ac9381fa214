"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from mie.errors import ConfigError


class StopStrings:
    """Passes a text on until a stop string is complete, holding back what may begin one.

    The first stop string to be complete wins, and of two that end together the longer: what comes
    out never depends on how the text was cut into pieces. Each character is looked at once per stop
    string (Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977).
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        if isinstance(stop, str):
            raise ConfigError(f"stop must be a list of strings, got the string {stop!r}")
        if "" in stop:
            raise ConfigError("a stop string must not be empty: it would match everywhere")
        self._matchers = [_Matcher(pattern) for pattern in stop]
        self._include = include_stop_str_in_output
        self._held = ""
        self._stopped = False

    def add(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """The text to pass on now, and the stop string that ended it, or None.

        With ``armed`` false (fewer than ``min_tokens`` so far) nothing stops the text, and no stop
        string begins in it. After a stop string everything is dropped.
        """
        if self._stopped:
            return "", None
        if not armed or not self._matchers:
            return self.flush() + text, None
        held = len(self._held)
        self._held += text
        for end, character in enumerate(text, start=held + 1):
            complete = [matcher for matcher in self._matchers if matcher.add(character)]
            if complete:
                return self._stop_at(end, max((m.pattern for m in complete), key=len))
        return self._release(max(matcher.matched for matcher in self._matchers)), None

    def peek(self, text: str) -> str | None:
        """The stop string that ``add(text)`` would find; nothing changes."""
        return self._fork().add(text)[1] if text and self._matchers else None

    def flush(self) -> str:
        """What was held back, since nothing follows; the search starts anew."""
        for matcher in self._matchers:
            matcher.matched = 0
        return self._release(0)

    def _stop_at(self, end: int, pattern: str) -> tuple[str, str]:
        text = self._held[: end if self._include else end - len(pattern)]
        self._held = ""
        self._stopped = True
        return text, pattern

    def _release(self, kept: int) -> str:
        cut = len(self._held) - kept
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _fork(self) -> StopStrings:
        fork = copy.copy(self)
        fork._matchers = [copy.copy(matcher) for matcher in self._matchers]
        return fork


class _Matcher:
    """How much of one pattern the text so far ends with."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0  # characters, always fewer than the whole pattern
        self._shorter = _borders(pattern)

    def add(self, character: str) -> bool:
        """Whether ``character`` completes the pattern."""
        while self.matched and self.pattern[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        self.matched += self.pattern[self.matched] == character
        return self.matched == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for end in range(1, len(pattern)):
        while length and pattern[length] != pattern[end]:
            length = borders[length - 1]
        length += pattern[length] == pattern[end]
        borders[end] = length
    return borders
