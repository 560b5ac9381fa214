"""Test answers on a terminal: Markdown, reasoning, and what a pipe gets."""

import io
import re

import pytest

from mie.cli.answer_writer import AnswerWriter, Look

pytest.importorskip("rich")


class Screen(io.StringIO):
    """A terminal that obeys the few control sequences that an answer uses."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """Return the lines of the screen, without styles."""
        lines, row = [""], 0
        for piece in re.findall(r"\x1b\[[\d;]*[A-Za-z]|.|\n", self.getvalue()):
            if piece == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif piece.endswith("A") and piece.startswith("\x1b"):
                row -= int(piece[2:-1])
            elif piece == "\x1b[J":
                lines = [*lines[:row], ""]
            elif piece == "\x1b[K":
                lines[row] = ""
            elif not piece.startswith("\x1b") and piece != "\r":
                lines[row] += piece
        return [line.rstrip() for line in lines]


@pytest.fixture(autouse=True)
def small_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "40", "LINES": "12", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)


def written(*pieces: str, look: Look | None = None, thoughts: tuple[str, ...] = ()) -> Screen:
    screen = Screen()
    writer = AnswerWriter(screen, look or Look(markdown=True))
    for thought in thoughts:
        writer.add_reasoning(thought)
    for piece in pieces:
        writer.add(piece)
    writer.finish()
    return screen


TEXT = "A **bold** word.\n\n* one\n* two\n\n```python\nx = 1\n\ny = 2\n```\n\nThe `end`."


def test_markdown_replaces_the_text_of_each_block() -> None:
    shown = written(TEXT).shown()
    text = "\n".join(shown)
    assert "A bold word." in shown
    assert " • one" in shown
    assert "**" not in text
    assert "```" not in text
    assert [line.strip() for line in shown if "=" in line] == ["x = 1", "y = 2"]
    assert shown[-2:] == ["The end.", ""]


def test_the_screen_does_not_depend_on_how_the_text_was_cut() -> None:
    assert written(*TEXT).shown() == written(TEXT).shown()


def test_plain_paragraphs_are_written_once() -> None:
    screen = written("One day, Mia the fox found a kite.\n\n", "She flew it.")
    assert "\x1b" not in screen.getvalue()
    assert screen.getvalue() == "One day, Mia the fox found a kite.\n\nShe flew it.\n"


def test_a_block_higher_than_the_terminal_stays_as_it_is() -> None:
    text = "".join(f"* line {number}\n" for number in range(20))
    assert "* line 0" in written(text).shown()
    assert "\x1b" not in written(text).getvalue()


def test_a_model_cannot_control_the_terminal() -> None:
    raw = written("**x** \x1b]0;title\x07 \x9b2J [y](http://evil/)").getvalue()
    assert "\x1b]" not in raw
    assert "\x07" not in raw
    assert "\x9b" not in raw
    assert "http://evil/" in raw  # a link shows where it leads


def test_reasoning_is_dim_or_hidden() -> None:
    dim = written("Yes.", thoughts=("\nLet me", " see."))
    assert dim.getvalue() == "\x1b[2mLet me see.\x1b[0m\n\nYes.\n"
    hidden = written(
        "Yes.", thoughts=("Let me", " see."), look=Look(markdown=True, reasoning="hide")
    )
    assert hidden.shown() == ["Yes.", ""]
    assert "thinking …" in hidden.getvalue()
    assert "Let me" not in hidden.getvalue()


def test_an_answer_of_reasoning_alone_ends_the_style() -> None:
    assert written(thoughts=("Hm",)).getvalue().startswith("\x1b[2mHm\x1b[0m")


def test_a_pipe_gets_the_answer_alone() -> None:
    pipe = io.StringIO()
    writer = AnswerWriter(pipe, Look(markdown=True))
    writer.add_reasoning("Let me see.")
    writer.add("A **bold** word.")
    writer.finish()
    assert pipe.getvalue() == "A **bold** word.\n"


def test_markdown_and_styles_need_a_terminal_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert written("A **bold** word.", thoughts=("Hm",)).getvalue() == "A **bold** word.\n"
