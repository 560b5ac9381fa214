"""Print to a terminal with word wrapping, and hide typed characters meanwhile."""

from __future__ import annotations

import termios
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_TAB = "    "


class WordWrap:
    """Writes text that arrives in pieces, and breaks its lines between words.

    The last word is held back until it ends, because only then is its width known. Control
    characters are removed, so that a model's text cannot control the terminal.
    """

    def __init__(self, write: Callable[[str], object], width: int) -> None:
        self._write = write
        self._width = max(1, width)
        self._column = 0
        self._spaces = ""
        self._word = ""

    def add(self, text: str) -> None:
        """Write all complete words of ``text`` and of the text before it."""
        for character in text:
            if character == "\n":
                self._end_line()
            elif character in " \t":
                self._end_word()
                self._spaces += _TAB if character == "\t" else character
            elif unicodedata.category(character) != "Cc":
                self._add_to_word(character)

    def finish(self) -> None:
        """Write the rest."""
        self._end_word()

    def _add_to_word(self, character: str) -> None:
        if _is_wide(
            character
        ):  # a separate word, because Chinese and Japanese lines may break anywhere
            self._end_word()
        self._word += character
        if _is_wide(character) or _width_of(self._word) >= self._width:
            self._end_word()

    def _end_line(self) -> None:
        self._end_word()
        self._write("\n")
        self._column, self._spaces = 0, ""

    def _end_word(self) -> None:
        if not self._word:
            return
        text = self._spaces + self._word
        if self._column + _width_of(text) > self._width:
            if self._column:
                self._write("\n")
            self._column, text = 0, self._word
        self._write(text)
        self._column += _width_of(text)
        self._spaces = self._word = ""


def _width_of(text: str) -> int:
    """Return the width of ``text`` in columns.

    A wide character has two columns and a combining character none.
    """
    return sum(
        0 if unicodedata.combining(character) else 1 + _is_wide(character) for character in text
    )


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"


@contextmanager
def typing_hidden(stream: TextIO | None) -> Iterator[None]:
    """Hide typed characters while something is printed, and keep them for the next prompt.

    Ctrl-C still works. A stream that is not a terminal is left alone.
    """
    if stream is None or not stream.isatty():
        yield
        return
    before = termios.tcgetattr(stream)
    quiet = termios.tcgetattr(stream)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(stream, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)
