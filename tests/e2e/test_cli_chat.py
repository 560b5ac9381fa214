"""Test ``mie chat`` as a process, with messages from a pipe or a pseudo-terminal."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, PATIENCE, NarrowPipe, error_line, mie, start
from hub_server import HubServer

from mie.checkpoint.locate import BUNDLED_DIRECTORY

GREEDY = ("--temperature", "0")


def test_each_line_is_answered_until_the_input_ends() -> None:
    process = mie("chat", *GREEDY, stdin=b"Who are you?\n\nWho are you?\n")
    assert process.returncode == 0
    assert process.stderr == b""
    first, second = process.stdout.decode().splitlines()
    assert first.startswith("I am the tiny story model")
    assert second


def test_a_full_context_is_reported_and_nothing_is_dropped() -> None:
    process = mie(
        *("chat", *GREEDY, "--max-model-len", "24", "--ignore-eos"),
        stdin=b"Who are you?\nWho are you?\n/reset\nWho are you?\n",
    )
    assert process.returncode == 1  # One message could not be answered.
    cut, refused, reset, cut_again = process.stderr.decode().splitlines()
    assert "the context of 24 tokens is full: the answer was cut. /reset starts over" in cut
    assert "the context holds 24" in refused
    assert "use /reset" in refused
    assert reset == "[a new conversation]"
    assert cut_again == cut
    first, second = process.stdout.decode().splitlines()
    assert first == second


@pytest.mark.slow
def test_a_full_context_drops_the_oldest_turns_if_told_to() -> None:
    options = ("--max-model-len", "48", "--max-tokens", "8", "--ignore-eos")
    asked = b"Who are you?\n" * 5
    process = mie("chat", *GREEDY, *options, "--when-full", "drop", stdin=asked)
    assert process.returncode == 0
    said = process.stderr.decode()
    assert "[the context of 48 tokens is full: forgot the oldest " in said
    assert len(process.stdout.splitlines()) == 5
    offered = mie("chat", *GREEDY, *options, stdin=asked + b"/drop\n")
    assert offered.returncode == 1
    assert "use /drop to forget the oldest turns and send it" in offered.stderr.decode()
    assert offered.stderr.decode().splitlines()[-2].startswith("[the context of 48 tokens is full")


@pytest.mark.parametrize(
    ("command", "form"),
    [
        pytest.param("run", "file", marks=pytest.mark.slow),
        ("chat", "text"),
        pytest.param("chat", "name", marks=pytest.mark.slow),
        pytest.param("generate", "file", marks=pytest.mark.slow),
    ],
)
def test_a_chat_template_may_be_given(command: str, form: str, tmp_path: Path) -> None:
    """The template leaves a message out, and begins a story in its place."""
    text = "{% if messages %}{{ bos_token }}Once upon a time{% endif %}"
    path = tmp_path / "own.jinja"
    path.write_text(text)
    directory = tmp_path / "model"
    shutil.copytree(BUNDLED_DIRECTORY, directory)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "story.jinja").write_text(text)
    given = {"file": path, "text": text, "name": "story"}[form]
    options = (*GREEDY, "--max-tokens", "8", "--chat-template", given)
    words = {
        "run": ("run", directory, *options, "Hello"),
        "chat": ("chat", directory, *options, "--prompt", "Hello"),
        "generate": ("generate", "--model", directory, "--chat", *options, "Hello"),
    }[command]
    plain = mie("generate", *GREEDY, "--max-tokens", "8", "Once upon a time")
    assert mie(*words).stdout.strip() == plain.stdout.strip()


@pytest.mark.parametrize("command", ["run", "chat", "generate"])
def test_a_chat_template_that_cannot_be_used_is_refused(command: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_bytes(b"\xff{{ x }}")
    opening = {"run": ("run", "bundled"), "chat": ("chat",), "generate": ("generate", "--chat")}
    message = {"run": ("Hi",), "chat": ("--prompt", "Hi"), "generate": ("Hi",)}[command]
    wrong = {
        "run": ("missing.jinja", "'missing.jinja' is neither a file, nor the text of a template"),
        "chat": (str(broken), "broken.jinja is not UTF-8 text"),
        "generate": ("{% if %}", "the chat template is not a jinja2 template"),
    }
    given, why = wrong[command]
    process = mie(*opening[command], "--chat-template", given, *message)
    assert process.stdout == b""
    assert why in process.stderr.decode()


@pytest.mark.slow
def test_a_model_without_a_template_gets_a_remedy_that_works(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(BUNDLED_DIRECTORY, directory)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))
    line = error_line(mie("run", directory, "Hi", *GREEDY))
    assert "no chat template in" in line
    assert "give one (--chat-template FILE with mie run, chat, generate or serve" in line
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert mie("run", directory, "Hi", "--chat-template", template).returncode == 0


def test_an_interrupt_stops_the_answer_but_not_the_program() -> None:
    # The first story continues until the context is full unless it is stopped. The second one ends.
    pipe = NarrowPipe()
    options = ("--ignore-eos", "--stop", "model of mie")
    with start("chat", *GREEDY, *options, stdout=pipe.writer) as process:
        pipe.close_writer()
        process.stdin.write(b"Tell me a story about Mia the fox, the garden and a kite.\n")
        process.stdin.flush()
        pipe.wait_for_bytes(process)
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"/reset\nWho are you?\n")
        process.stdin.close()
        output = pipe.read()
        assert process.stderr.readline() == b"[stopped]\n"
        errors = process.stderr.read()
        assert process.wait(PATIENCE) == 0
    assert errors == b"[a new conversation]\n"
    assert output.endswith(b"\nI am the tiny story \n")


@pytest.mark.parametrize("words", [("chat", "--prompt"), ("run", "bundled")], ids=["chat", "run"])
def test_an_interrupt_of_the_only_answer_ends_the_program(words: tuple[str, ...]) -> None:
    pipe = NarrowPipe()
    story = "Tell me a story about Mia the fox, the garden and a kite."
    with start(*words, story, *GREEDY, "--ignore-eos", stdout=pipe.writer) as process:
        pipe.close_writer()
        pipe.wait_for_bytes(process)
        process.send_signal(signal.SIGINT)
        assert pipe.read()
        assert process.stderr.read() == b"[stopped]\nmie: interrupted\n"
        assert process.wait(PATIENCE) == 130


class Terminal:
    """A terminal of 60 columns, and ``mie chat`` or another command on it."""

    def __init__(self, *arguments: str, command: str = "chat", **environment: str) -> None:
        self.keyboard, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0))
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        # No queries of the cursor's position, which nothing here would answer.
        plain = {"TERM": "xterm", "COLUMNS": "60", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = start(
            command, *arguments, env={**ENVIRONMENT, **plain, **environment}, **streams
        )
        os.close(terminal)
        self._shown, self._start = b"", 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self.keyboard)

    def type(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def shown_until(self, end: str, seconds: float = PATIENCE) -> str:
        """Return the text shown next, up to ``end``, without cursor movements."""
        while (at := self._text().find(end, self._start)) < 0:
            ready, _, _ = select.select([self.keyboard], [], [], seconds)
            assert ready, f"waited for {end!r}; the terminal shows {self._text()[self._start :]!r}"
            self._shown += os.read(self.keyboard, 4096)
        start, self._start = self._start, at + len(end)
        return self._text()[start : self._start]

    def _text(self) -> str:
        return ESCAPES.sub("", self._shown.decode(errors="ignore")).replace("\r", "")


ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[@-Z\\-_=>])|\a")
SPEED = re.compile(r"\[\d+ tokens · [\d.]+ tokens/s\]")
STORY = "Tell me a story about Mia the fox, the garden and a kite."


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """An environment without prompt_toolkit."""
    fails = "raise ImportError('hidden', name='prompt_toolkit')\n"
    (tmp_path / "prompt_toolkit.py").write_text(fails)
    paths = (str(tmp_path), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.parametrize("command", [("chat",), ("run", "mia/a-model-that-is-never-fetched")])
def test_a_terminal_needs_the_extra_and_names_it_before_anything_is_loaded(command, hidden) -> None:
    name, *words = command
    with Terminal(*words, command=name, **hidden) as terminal:
        shown = terminal.shown_until("toolkit rich)")
        assert terminal.process.wait(PATIENCE) == 2
    (line,) = shown.strip().splitlines()
    assert line.startswith("mie: error: a conversation in a terminal needs the package prompt_tool")
    assert line.endswith("pip install prompt_toolkit rich)")


@pytest.mark.slow
def test_one_message_needs_no_extra_in_a_terminal(hidden) -> None:
    with Terminal(*GREEDY, "bundled", "Who are you?", command="run", **hidden) as terminal:
        assert "I am the tiny story model" in terminal.shown_until("model")
        assert terminal.process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_answers_to_a_file_need_no_extra(tmp_path: Path, hidden) -> None:
    keyboard, terminal = pty.openpty()
    answers = tmp_path / "answers.txt"
    with answers.open("wb") as file:
        environment = {**ENVIRONMENT, **hidden}
        with start("chat", *GREEDY, stdin=terminal, stdout=file, env=environment) as process:
            os.close(terminal)
            os.write(keyboard, b"Who are you?\n/exit\n")
            assert process.stderr.read() == b""
            assert process.wait(PATIENCE) == 0
    os.close(keyboard)
    assert answers.read_text().startswith("I am the tiny story model")


@pytest.fixture(scope="module")
def terminal() -> Iterator[Terminal]:
    """A chat that waits for a message. Each test leaves it so."""
    pytest.importorskip("prompt_toolkit")
    with Terminal(*GREEDY) as terminal:
        terminal.shown_until(">")
        yield terminal


@pytest.mark.slow
def test_a_terminal_shows_a_greeting_and_a_prompt() -> None:
    pytest.importorskip("prompt_toolkit")
    with Terminal(*GREEDY) as terminal:
        greeting = terminal.shown_until(">")
        assert "Ctrl-C stops an answer" in greeting
        terminal.type("Who are you?\n")
        answer = terminal.shown_until("tokens/s]")
        assert "I am the tiny story model" in answer
        assert SPEED.search(answer)
        terminal.shown_until(">")
        terminal.type("/help\n")
        terminal.shown_until("forget everything")
        terminal.shown_until(">")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_ctrl_c_clears_the_line() -> None:
    pytest.importorskip("prompt_toolkit")
    with Terminal(*GREEDY) as terminal:
        terminal.shown_until(">")
        # The prompt appears a moment before keys or signals are handled. prompt_toolkit reads
        # Ctrl-C as a key, and pressing it again does no harm.
        for _ in range(300):
            terminal.type("\x03")
            with suppress(AssertionError):
                assert "/exit ends" in terminal.shown_until(">", seconds=0.2)
                break
        terminal.type("/exit\n")
        assert terminal.process.wait(PATIENCE) == 0


def test_an_answer_is_wrapped_and_typing_beside_it_waits_for_the_next_prompt(terminal) -> None:
    whole = mie("chat", *GREEDY, stdin=STORY.encode()).stdout.decode()
    terminal.type("/reset\n")
    terminal.shown_until("[a new conversation]")
    terminal.shown_until(">")
    terminal.type(f"{STORY}\n")
    begun = terminal.shown_until(whole[:20])
    terminal.type("Who are you")
    shown = begun + terminal.shown_until("tokens/s]\n")
    answer = shown[shown.index(whole[:20]) : shown.rindex("[")]
    assert answer.split() == whole.split()
    assert 40 < max(map(len, answer.splitlines())) <= 60
    terminal.shown_until("Who are you")  # after the prompt
    terminal.type("?\n")
    terminal.shown_until("tokens/s]")
    terminal.shown_until(">")


def test_a_pasted_block_is_one_message(terminal: Terminal) -> None:
    terminal.type("\x1b[200~Who are you?\n/exit\x1b[201~")
    terminal.shown_until("/exit")
    terminal.type("\n")
    terminal.shown_until("tokens/s]")
    terminal.shown_until(">")  # /exit was not a command


def test_the_last_message_can_be_edited(terminal: Terminal) -> None:
    terminal.type("/reset\n")
    terminal.shown_until("[a new conversation]")
    terminal.shown_until(">")
    terminal.type("Who are you\n")
    terminal.shown_until("tokens/s]")
    terminal.shown_until(">")
    terminal.type("/edit\n")
    terminal.shown_until("> Who are you")
    terminal.type("?\n")
    assert "I am the tiny story model" in terminal.shown_until("tokens/s]")
    terminal.type("/stats\n")
    assert "first token after" in terminal.shown_until("prompt tokens cached]")
    terminal.shown_until(">")


@pytest.mark.slow
def test_a_missing_model_is_fetched_if_the_user_agrees(tmp_path: Path) -> None:
    pytest.importorskip("prompt_toolkit")
    files = {path.name: path.read_bytes() for path in BUNDLED_DIRECTORY.iterdir()}
    with HubServer({"mia/tiny": files}) as hub:
        places = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        with Terminal(*GREEDY, "mia/tiny", command="run", **places) as terminal:
            question = terminal.shown_until("[Y/n]")
            assert "mia/tiny is not on this machine. Fetch 6 files of 6.7 MiB?" in question
            terminal.type("\n")
            assert "mia/tiny ·" in terminal.shown_until("stops an answer")
            terminal.shown_until(">")
            terminal.type("Who are you?\n")
            assert "I am the tiny story model" in terminal.shown_until("tokens/s]")
        with Terminal("mia/other", command="run", **places) as terminal:
            assert "no such model on the hub" in terminal.shown_until("HF_TOKEN)")
            assert terminal.process.wait(PATIENCE) == 2


def test_one_message_is_answered_and_may_come_from_a_file() -> None:
    once = mie("chat", *GREEDY, "--prompt", "Who are you?")
    assert once.returncode == 0
    assert once.stdout.startswith(b"I am the tiny story model")
    assert mie("chat", *GREEDY, "--prompt", "-", stdin=b"Who are you?\n").stdout == once.stdout
    assert "is not UTF-8" in error_line(mie("chat", "--prompt", "-", stdin=b"\xff"))
    long = mie("chat", "--prompt", "-", "--max-model-len", "8", stdin=b"word " * 40)
    assert long.returncode == 1
    assert long.stdout == b""


@pytest.mark.slow
def test_triple_quotes_work_in_a_pipe() -> None:
    process = mie("chat", *GREEDY, stdin=b'"""\nWho are\nyou?\n"""\n/help\n')
    assert process.returncode == 0
    assert len(process.stdout.splitlines()) == 1
    assert b"/reset           forget" in process.stderr
    assert 'ends inside the message that """ began' in mie("chat", stdin=b'"""\n').stderr.decode()


@pytest.mark.slow
def test_unknown_commands_and_bad_input_are_named() -> None:
    process = mie("chat", *GREEDY, stdin=b"/exist\n")
    assert process.returncode == 1
    assert b"unknown command /exist; did you mean /exit?" in process.stderr
    assert b"unknown command /abacus; /help shows" in mie("chat", stdin=b"/abacus\n").stderr
    assert "is not UTF-8: byte 0xff" in error_line(mie("chat", *GREEDY, stdin=b"\xff\n"))
