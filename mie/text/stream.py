"""Turn the tokens of a completion into text that ends at a stop string."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mie.errors import ConfigError
from mie.text.detokenizer import Detokenizer
from mie.text.tokenizer import Tokenizer


class TextStream:
    """Converts token ids to text until a stop string is complete.

        stream = TextStream(tokenizer, prompt_token_ids, stop=["\\n\\n"])
        text, stopped_by = stream.add([token_id])      # in every step
        text += stream.finish()[0]                     # if no stop string ended the text

    A stop string is found with the token that completes it, even if the detokenizer holds back the
    whole text. Only new text is searched, never the prompt. The choices of one request are `fork` s
    of one stream, so that the prompt and the stop strings are prepared once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        **options: Any,
    ) -> None:
        """``options`` are passed to `Detokenizer`."""
        self.detokenizer = Detokenizer(tokenizer, prompt_token_ids, **options)
        """Converts the tokens. Without stop strings, its text is the text of the stream."""
        self._stop = StopStrings(stop, include_stop_str_in_output)
        self._searches = bool(stop)
        self._exempt = 0  # held-back characters that arrived while unarmed

    def fork(self) -> TextStream:
        """Return an independent copy."""
        fork = copy.copy(self)
        fork.detokenizer, fork._stop = self.detokenizer.fork(), self._stop.fork()
        return fork

    def add(self, token_ids: Sequence[int], armed: bool = True) -> tuple[str, str | None]:
        """Return the text that ``token_ids`` add, and the stop string that ended it or None.

        ``armed`` is false while ``min_tokens`` forbids stopping. A stop string that these tokens
        complete is then ordinary text. A stop string that they begin counts when it is complete.
        """
        text = self.detokenizer.add(token_ids)
        if not self._searches:
            return text, None
        text, found = self._search(text, armed)
        if found is not None:
            return text, found
        pending = self.detokenizer.pending()
        if not armed:
            self._exempt = len(pending.partition("\ufffd")[0])
        elif "\ufffd" not in pending and self._stop.peek(pending, self._exempt) is not None:
            more, found = self._stop.add(pending, self._exempt)
            text += more
        return text, found

    def finish(self, armed: bool = True) -> tuple[str, str | None]:
        """Return the rest of the text after the last token, and the stop string in it or None."""
        text, found = self._search(self.detokenizer.finish(), armed)
        return (text, found) if found else (text + self._stop.flush(), None)

    def _search(self, text: str, armed: bool) -> tuple[str, str | None]:
        exempt = min(self._exempt, len(text)) if armed else len(text)
        self._exempt -= min(self._exempt, len(text))
        return self._stop.add(text, exempt)


class StopStrings:
    """Passes text on until a stop string is complete, and holds back the beginning of one.

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
        because ``min_tokens`` is not reached there. A stop string that begins there and ends later
        counts. All text after a stop string is dropped.
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
        if not state and self._automaton.firsts.isdisjoint(text):
            return len(text), 0
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
        self.firsts = {pattern[0] for pattern in patterns}
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
