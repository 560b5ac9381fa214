"""Print a model's answer as it is generated: wrapped, with Markdown and dimmed reasoning."""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from dataclasses import dataclass
from typing import TextIO

from mie.cli.terminal import WordWrap
from mie.errors import MissingExtraError, install_command

REASONING = ("dim", "hide")
"""The ways to print reasoning."""

_DIM, _PLAIN, _ERASE_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
_MARKUP = re.compile(r"[*_`#|>\[~]|^\s*(?:[-+]|\d+[.)])\s", re.MULTILINE)
_FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)


@dataclass
class Look:
    """How answers are printed on a terminal. Elsewhere they are plain text without reasoning."""

    markdown: bool
    reasoning: str = "dim"

    @classmethod
    def of(cls, markdown: bool | None, reasoning: str = "dim") -> Look:
        """Return the look that the user chose. Markdown is the default where rich is installed.

        Raises:
            MissingExtraError: Markdown is wanted, and rich is not installed.
        """
        if markdown and not _has_rich():
            raise MissingExtraError(
                "Markdown needs rich, which is not installed: "
                f"{install_command('chat')}, or use --no-markdown"
            )
        return cls(_has_rich() if markdown is None else markdown, reasoning)


class AnswerWriter:
    """Prints an answer in pieces.

    Text is wrapped as it arrives. When a paragraph, a list or a block of code has ended, and has
    Markdown, it is erased and printed formatted, unless it is higher than the terminal.
    """

    def __init__(self, stream: TextIO, look: Look) -> None:
        self._stream, self._look = stream, look
        self._size = shutil.get_terminal_size()
        self._is_terminal = stream.isatty()
        self._is_dumb = os.environ.get("TERM", "dumb") == "dumb"
        self._wrap = WordWrap(self._write, self._size.columns)
        self._block = ""
        self._num_lines = 0  # ended since the block began
        self._is_reasoning = False

    def add(self, text: str) -> None:
        """Print the next piece of the answer."""
        if self._is_reasoning and text:
            self._end_reasoning()
            text = text.lstrip("\n")
        if not self._is_terminal:
            self._stream.write(text)
        elif not self._look.markdown or self._is_dumb:
            self._wrap.add(text)
        else:
            for line in text.splitlines(keepends=True):
                self._wrap.add(line)
                self._block += line
                if self._block.endswith("\n\n") and len(_FENCE.findall(self._block)) % 2 == 0:
                    self._end_block()
        self._stream.flush()

    def add_reasoning(self, text: str) -> None:
        """Print the next piece of the reasoning. It comes before the answer."""
        if not text or not self._is_terminal or self._is_dumb:
            return
        is_hidden = self._look.reasoning == "hide"
        if not self._is_reasoning:
            self._is_reasoning = True
            text = text.lstrip("\n")
            self._stream.write(_DIM + ("thinking …" if is_hidden else ""))
        if not is_hidden:
            self._wrap.add(text)
        self._stream.flush()

    def finish(self) -> None:
        """Print the held-back text and end the line."""
        if self._is_reasoning:
            self._end_reasoning()
        self._wrap.finish()
        if self._block:
            self._end_block()
        self._stream.write("\n")
        self._stream.flush()

    def _write(self, text: str) -> None:
        self._num_lines += text.count("\n")
        self._stream.write(text)

    def _end_reasoning(self) -> None:
        self._wrap.finish()
        self._stream.write(_PLAIN + (_ERASE_LINE if self._look.reasoning == "hide" else "\n\n"))
        self._is_reasoning, self._num_lines = False, 0
        self._wrap = WordWrap(self._write, self._size.columns)

    def _end_block(self) -> None:
        self._wrap.finish()
        if _MARKUP.search(self._block) and self._num_lines < self._size.lines - 1:
            up = f"\x1b[{self._num_lines}A" if self._num_lines else ""
            end = "\n\n" if self._block.endswith("\n\n") else ""
            text = _formatted(self._block, self._size.columns)
            self._stream.write(f"\r{up}\x1b[J{text}{end}")
        self._block, self._num_lines = "", 0
        self._wrap = WordWrap(self._write, self._size.columns)


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401  # light, unlike its modules
    except ImportError:
        return False
    return True


def _formatted(text: str, width: int) -> str:
    """Return Markdown as text with the terminal's styles, without the model's control characters.

    The addresses of links are printed, so that a link shows where it leads.
    """
    from rich.console import Console
    from rich.markdown import Markdown

    plain = "".join(x for x in text if x in "\n\t" or unicodedata.category(x) != "Cc")
    console = Console(force_terminal=True, width=width, highlight=False)
    with console.capture() as captured:
        console.print(Markdown(plain, hyperlinks=False, code_theme="ansi_dark"))
    lines = [line.rstrip() for line in captured.get().strip("\n").splitlines()]
    return "\n".join(lines)
