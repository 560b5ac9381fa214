"""``mie chat`` as a process, with messages from a pipe."""

import os
import pty
import select
import signal
import time
from pathlib import Path

import pytest
from command_line import PATIENCE, NarrowPipe, error_line, mie, start

GREEDY = ("--temperature", "0")


def test_each_line_is_answered_until_the_input_ends() -> None:
    process = mie("chat", *GREEDY, stdin=b"Who are you?\n\nWho are you?\n")
    assert process.returncode == 0
    assert process.stderr == b""
    first, second = process.stdout.decode().splitlines()
    assert first.startswith("I am the tiny story model")
    assert second


def test_exit_ends_and_reset_forgets() -> None:
    process = mie(
        "chat", *GREEDY, stdin=b"Who are you?\n/reset\nWho are you?\n/exit\nWho are you?\n"
    )
    first, second = process.stdout.decode().splitlines()
    assert first == second  # the second was a first again
    assert process.stderr.decode() == "[a new conversation]\n"


def test_a_full_context_is_said_and_nothing_is_dropped() -> None:
    process = mie(
        *("chat", *GREEDY, "--max-model-len", "24", "--ignore-eos"),
        stdin=b"Who are you?\nWho are you?\n/reset\nWho are you?\n",
    )
    assert process.returncode == 1  # one message could not be answered
    cut, refused, reset, cut_again = process.stderr.decode().splitlines()
    assert "the context of 24 tokens is full: the answer was cut. /reset starts anew" in cut
    assert "the context holds 24" in refused
    assert "/reset starts anew" in refused
    assert reset == "[a new conversation]"
    assert cut_again == cut
    first, second = process.stdout.decode().splitlines()
    assert first == second


def test_an_answer_cut_by_max_tokens_says_so() -> None:
    process = mie("chat", *GREEDY, "--max-tokens", "3", stdin=b"Who are you?\n")
    assert process.stderr == b"[cut at --max-tokens 3]\n"


def test_an_interrupt_stops_the_answer_and_not_the_program() -> None:
    # A story that goes on until the context is full, unless it is stopped; then one that ends.
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


def test_a_terminal_is_greeted_and_prompted() -> None:
    keyboard, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with start("chat", *GREEDY, **streams) as process:
        os.close(terminal)
        try:
            assert "Ctrl-C stops an answer" in shown_until("> ", keyboard)
            os.write(keyboard, b"Who are you?\n")
            assert "I am the tiny story model" in shown_until("> ", keyboard)
            until_asleep(process.pid)  # readline shows the prompt before it listens to signals
            process.send_signal(signal.SIGINT)  # begins the line anew
            assert "/exit ends" in shown_until("> ", keyboard)
            os.write(keyboard, b"\x04")  # Ctrl-D
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            os.close(keyboard)


def until_asleep(process_id: int) -> None:
    """Wait until a process waits for something itself: here for keys, or for a signal."""
    status = Path(f"/proc/{process_id}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.01)  # leaves the CPU to it


def shown_until(end: str, terminal: int) -> str:
    """What a terminal shows, up to a line that begins with ``end``."""
    shown = b""
    while f"\n{end}".encode() not in shown.replace(b"\x1b[?2004h", b""):
        ready, _, _ = select.select([terminal], [], [], PATIENCE)
        assert ready, f"waited for {end!r}; the terminal shows {shown!r}"
        shown += os.read(terminal, 4096)
    return shown.decode()


def test_unknown_commands_and_bad_input_are_named() -> None:
    process = mie("chat", *GREEDY, stdin=b"/quit\n")
    assert process.returncode == 1
    assert b"unknown command /quit: /exit ends" in process.stderr
    assert "is not UTF-8: byte 0xff" in error_line(mie("chat", stdin=b"\xff\n"))


@pytest.mark.parametrize("arguments", [("./no/such",), ("--model", "./no/such")])
def test_a_model_that_is_not_there_is_named(arguments: tuple[str, ...]) -> None:
    assert "model directory './no/such' does not exist" in error_line(mie("chat", *arguments))


def test_a_closed_pipe_ends_it_quietly() -> None:
    pipe = NarrowPipe()
    with start("chat", "--ignore-eos", stdout=pipe.writer) as process:
        pipe.close_writer()
        process.stdin.write(b"Who are you?\n")
        process.stdin.flush()
        pipe.wait_for_bytes(process)
        pipe.close_reader()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE) == 141
