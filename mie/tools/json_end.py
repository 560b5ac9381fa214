"""Find where a JSON object or list ends in a text that arrives in pieces."""

from __future__ import annotations

import re

_MARK = re.compile(r'["\\{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Counts the brackets of one object or list. Each character is read once.

    It does not check what stands between them.
    """

    def __init__(self, start: int = 0) -> None:
        """``start`` is the place of the first bracket."""
        self.place = start
        """How far the text was read; after the end, the place behind the last bracket."""
        self._depth = 0
        self._is_string = False

    def read(self, text: str) -> bool:
        """Read on in a text that has grown, and return whether the end was found."""
        while True:
            mark = (_IN_STRING if self._is_string else _MARK).search(text, self.place)
            if mark is None:
                self.place = len(text)
                return False
            if mark.group() == "\\":
                if mark.end() == len(text):  # what it escapes is still to come
                    self.place = mark.start()
                    return False
                self.place = mark.end() + 1
                continue
            self.place = mark.end()
            if mark.group() == '"':
                self._is_string = not self._is_string
            else:
                self._depth += 1 if mark.group() in "{[" else -1
                if self._depth <= 0:
                    return True
