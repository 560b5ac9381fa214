"""Test messages of several lines, word wrapping, and hidden typing, without a model."""

import itertools
import os
import pty
import random
import termios
from collections.abc import Iterator

import pytest

from mie.cli.terminal import Message, ReadLine, WordWrap, read_message, typing_hidden
from mie.errors import RequestError


def lines(*texts: str) -> ReadLine:
    """Return a reader that gives these lines and then the end of the input."""
    left: Iterator[str] = iter(texts)
    return lambda prompt: next(left, None)


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (('"""', "one", "  two", '"""'), "one\n  two"),
        (('"""one', 'two"""'), "one\ntwo"),
        (('"""one"""',), "one"),
        ((' """/exit', '"""  '), "/exit"),
        (('"""', "", "one", "", '"""'), "one"),
    ],
)
def test_triple_quotes_enclose_a_message_of_several_lines(typed, text) -> None:
    message = read_message(lines(*typed))
    assert message == Message(text=text, is_quoted=True)
    assert message.command is None


def test_quotes_that_are_not_closed_are_named() -> None:
    with pytest.raises(RequestError, match=r'the input ends inside the message that """ began'):
        read_message(lines('"""', "one"))


def test_a_command_is_one_line_that_begins_with_a_slash() -> None:
    assert read_message(lines()) is None
    assert Message(text=" /reset ").command == "/reset"
    assert Message(text="/usr/bin is a\nfolder").command is None  # a pasted block
    assert Message(text="1/2").command is None


def wrapped(text: str, width: int, cuts: list[int] | None = None) -> str:
    shown: list[str] = []
    wrap = WordWrap(shown.append, width)
    ends = [0, *sorted(cuts or []), len(text)]
    for start, end in itertools.pairwise(ends):
        wrap.add(text[start:end])
    wrap.finish()
    return "".join(shown)


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("one two three", 7, "one two\nthree"),
        ("one two", 7, "one two"),
        ("one  two", 5, "one\ntwo"),
        ("abcdefgh ij", 4, "abcd\nefgh\nij"),
        ("a\n  b\n\nc", 9, "a\n  b\n\nc"),
        ("狐狸狐狸狐狸", 5, "狐狸\n狐狸\n狐狸"),
        ("a\tb", 9, "a    b"),
        ("red \x1b[31m", 20, "red [31m"),
        ("cafe\u0301 au lait", 7, "cafe\u0301 au\nlait"),
    ],
)
def test_lines_break_between_words(text: str, width: int, expected: str) -> None:
    assert wrapped(text, width) == expected


def test_wrapping_does_not_depend_on_how_the_text_was_cut() -> None:
    random.seed(0)
    for _ in range(200):
        text = "".join(random.choices("ab狐 \n", k=40))
        width = random.randint(2, 12)
        whole = wrapped(text, width)
        assert wrapped(text, width, random.choices(range(41), k=9)) == whole
        assert "".join(whole.split()) == "".join(text.split())
        assert max(len(line) + line.count("狐") for line in whole.split("\n")) <= width


def test_typing_is_hidden_and_kept() -> None:
    keyboard, terminal = pty.openpty()
    with os.fdopen(terminal, "r+b", buffering=0) as raw:
        before = termios.tcgetattr(raw)
        stream = os.fdopen(os.dup(terminal), encoding="utf-8")
        with typing_hidden(stream):
            assert not termios.tcgetattr(raw)[3] & termios.ECHO
            assert termios.tcgetattr(raw)[3] & termios.ISIG  # Ctrl-C works
            os.write(keyboard, b"typed\n")
        assert termios.tcgetattr(raw) == before
        assert stream.readline() == "typed\n"
        stream.close()
    os.close(keyboard)
