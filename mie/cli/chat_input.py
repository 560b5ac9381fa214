"""Read the messages of ``mie chat`` from a terminal or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mie.errors import RequestError

QUOTES = '"""'

ReadLine = Callable[..., "str | None"]
"""A function that shows a prompt and returns the line typed, or None at the end of the input.

A second argument is the text with which the line begins, which a terminal lets the user change.
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
    """Read a line of standard input, which is not a terminal. ``prompt`` is not shown."""
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
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input is not UTF-8: byte 0x{raw[error.start]:02x} in "
            f"{raw[max(0, error.start - 20) :][:40]!r}"
        ) from error


def read_plainly(prompt: str, text: str = "") -> str | None:
    """Read a line with the editing keys of Python's readline module."""
    with suppress(ImportError):
        import readline  # importing it enables editing keys in input()

        readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        return input(prompt)
    except EOFError:
        print()
        return None


def line_editor() -> ReadLine | None:
    """Return a reader with prompt_toolkit's keys, or None if it is not installed.

    A pasted block is one message, and Alt-Enter begins a new line.
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    except ImportError:
        return None

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
