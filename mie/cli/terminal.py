"""Print to a terminal with word wrapping, hide typed characters meanwhile, and read messages."""

import sys
import termios
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from mie.base.files import without_bom
from mie.errors import RequestError, needing_extra

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


QUOTES = '"""'

ReadLine = Callable[..., "str | None"]
"""A function that shows a prompt and returns the line typed, or None at the end of the input.

A second argument is the text at the beginning of the line. In a terminal, the user can change it.
"""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message to the model, or a command to the program."""

    text: str
    is_quoted: bool = False
    """Whether it was between triple quotes."""

    @property
    def command(self) -> str | None:
        """The command, if the message is one unquoted line that begins with a slash, else None."""
        line = self.text.strip()
        is_command = line.startswith("/") and "\n" not in line and not self.is_quoted
        return line if is_command else None


def read_message(read_line: ReadLine) -> Message | None:
    '''Read a line, or all lines between two """; return None at the end of the input.

    Raises:
        RequestError: the input ends before the closing quotes.
    '''
    first = read_line("> ")
    if first is None:
        return None
    if not first.lstrip().startswith(QUOTES):
        return Message(text=first)
    lines = [first.lstrip().removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        line = read_line("... ")
        if line is None:
            raise RequestError(
                f"the input ends inside the message that {QUOTES} began; end it with {QUOTES}"
            )
        lines.append(line)
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return Message(text="\n".join(lines).strip("\n"), is_quoted=True)


def read_from_pipe(prompt: str) -> str | None:
    """Read a line of standard input that is not a terminal. ``prompt`` is not shown."""
    raw = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    return _decoded(raw).rstrip("\r\n") if raw else None


def read_all_from_pipe() -> str:
    """Read standard input to its end, as one message.

    Raises:
        RequestError: it is not UTF-8.
    """
    raw = sys.stdin.buffer.read() if sys.stdin is not None else b""
    return _decoded(raw).strip("\r\n")


def _decoded(raw: bytes) -> str:
    try:
        return without_bom(raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8: byte 0x{raw[error.start]:02x} in "
            f"{raw[max(0, error.start - 20) :][:40]!r}"
        ) from error


def line_editor() -> ReadLine:
    """Return a reader with prompt_toolkit's keys.

    A pasted block is one message, and Alt-Enter begins a new line.

    Raises:
        MissingExtraError: prompt_toolkit is not installed.
    """
    with needing_extra("chat", "a conversation in a terminal"):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    keys = KeyBindings()
    keys.add("escape", "enter")(new_line)
    session: PromptSession[str] = PromptSession(key_bindings=keys)

    def read_line(prompt: str, text: str = "") -> str | None:
        try:
            line: str = session.prompt(prompt, default=text)
        except EOFError:
            return None
        return line

    return read_line
