"""Test the helper processes alone, with work of a few numbers in shared memory."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import exit_code_of_child
from interrupts import KINDS, Injector

from mie.ops_cpu.allocator import shared_zeros
from mie.ops_cpu.processes import helpers as module
from mie.ops_cpu.processes.helpers import HelperProcesses, pack, unpack

pytestmark = pytest.mark.skipif(
    not module.IS_AVAILABLE, reason="helper processes need Linux's eventfd and pidfd"
)
PATIENCE = 120.0
"""Seconds after which a wait has failed. Waits that succeed take no time."""
ENTRIES = 4
"""Numbers of a message in memory: whether it has begun, who did it, its number, and a counter."""
HAS_BEGUN, WHO, NUMBER, COUNT = range(ENTRIES)


def wait_until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


def state_of(pid: int) -> str:
    """Return the state of a process, such as "S", or "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children() -> set[int]:
    """Return the children of this process, zombies among them."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = stat.read_text().partition(" ")
            if int(rest.rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(number))
    return found


def open_files() -> set[int]:
    # The listing's own file is closed by the time that it is looked at.
    names = os.listdir("/proc/self/fd")
    return {int(name) for name in names if os.path.lexists(f"/proc/self/fd/{name}")}


class Board:
    """Shared memory in which each message fills a row, and the helpers that do so."""

    def __init__(self, number: int = 1, act: Callable[[Board, int], object] | None = None) -> None:
        """Start the helpers. In them a message also calls act(board, row)."""
        self.rows = shared_zeros((8, ENTRIES), np.int64)
        self.pid = os.getpid()
        self._act = act
        rows, pid = self.rows, os.getpid()

        def do(message: bytes) -> None:
            row, value, *_ = unpack(message)
            rows[row, WHO] = os.getpid()
            rows[row, HAS_BEGUN] = 1
            if act is not None and os.getpid() != pid:
                act(self, row)
            rows[row, NUMBER] = value

        self.helpers = HelperProcesses(number, do)
        self.pids = [helper._pid for helper in self.helpers._helpers]

    def run(
        self, number: int = 1, own: Callable[[], object] = lambda: None, *, together: bool = True
    ) -> None:
        """Do messages, and check the results. ``together`` waits until all helpers have begun."""
        self.rows[:] = 0

        def both() -> None:
            if together:
                wait_until(lambda: self.nudge() or self.rows[:number, HAS_BEGUN].all())
            own()

        self.helpers.run([pack(row, 10 + row) for row in range(number)], both)
        assert self.rows[:number, NUMBER].tolist() == [10 + row for row in range(number)]

    def nudge(self) -> None:
        """Wake helpers that fell asleep just when they got a message, as the caller never does."""
        for helper in self.helpers._helpers:
            os.eventfd_write(helper._wake, 1)

    def sleep(self) -> None:
        """Wait until all helpers sleep."""
        self.run(len(self.pids))
        helpers = self.helpers._helpers
        wait_until(lambda: all(each.state[0] == 1 for each in helpers))
        wait_until(lambda: all(state_of(pid) == "S" for pid in self.pids))

    def workers(self, number: int = 1) -> list[int]:
        """Return which process did each message."""
        return self.rows[:number, WHO].tolist()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    gc.collect()
    before, files = children(), open_files()
    yield
    gc.collect()
    assert children() <= before
    assert open_files() <= files


@pytest.fixture
def new_board() -> Iterator[Callable[..., Board]]:
    made: list[Board] = []

    def new(*arguments: Any) -> Board:
        made.append(Board(*arguments))
        return made[-1]

    yield new
    for board in made:
        board.helpers.close()
        assert not any(state_of(pid) for pid in board.pids)


def loop(board: Board, row: int) -> None:
    """Count forever."""
    while True:
        board.rows[row, COUNT] += 1


# Sharing work.


@pytest.mark.parametrize("number", [1, 3])
def test_each_helper_does_its_message(number: int, new_board: Callable[..., Board]) -> None:
    board = new_board(number)
    for _ in range(20):
        board.run(number)
        assert board.workers(number) == board.pids
    board.run(1)
    assert board.workers() == board.pids[:1]


def test_messages_carry_eight_numbers() -> None:
    assert unpack(pack(1, -2, 1 << 40)) == (1, -2, 1 << 40, 0, 0, 0, 0, 0)


def test_a_sleeping_helper_is_woken(new_board: Callable[..., Board]) -> None:
    board = new_board(2)
    for _ in range(3):
        board.sleep()
        board.rows[:] = 0
        begun = lambda: wait_until(lambda: board.rows[:, HAS_BEGUN].sum() == 2)  # noqa: E731
        board.helpers.run([pack(0), pack(1)], begun)
        assert board.workers(2) == board.pids


def test_what_no_helper_has_begun_is_taken_back(new_board: Callable[..., Board]) -> None:
    board = new_board(2)
    os.kill(board.pids[0], signal.SIGSTOP)
    wait_until(lambda: state_of(board.pids[0]) == "T")
    for _ in range(3):
        board.run(2, lambda: wait_until(lambda: board.rows[1, HAS_BEGUN]), together=False)
        assert board.workers(2) == [os.getpid(), board.pids[1]]
    os.kill(board.pids[0], signal.SIGCONT)
    board.run(2)
    assert board.workers(2) == board.pids
    assert board.helpers.are_usable


def test_it_tells_how_much_later_than_the_caller_the_helpers_ended(
    new_board: Callable[..., Board],
) -> None:
    def act(board: Board, row: int) -> None:
        if board.rows[1, COUNT]:
            wait_until(lambda: board.rows[0, COUNT])

    board = new_board(1, act)

    def release_later() -> None:
        wait_until(lambda: board.rows[0, HAS_BEGUN])
        timer = threading.Timer(0.05, lambda: board.rows.__setitem__((0, COUNT), 1))
        timer.start()

    board.rows[1, COUNT] = 1
    assert board.helpers.run([pack(0, 1)], release_later) > 0
    board.rows[:] = 0
    done = lambda: wait_until(lambda: board.rows[0, NUMBER])  # noqa: E731  # one line reads better
    assert board.helpers.run([pack(0, 1)], lambda: (done(), time.sleep(0.05))) < 0


def test_it_works_from_any_thread_and_beside_others(new_board: Callable[..., Board]) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            board = new_board(2)
            for _ in range(20):
                board.run(2)
                assert board.workers(2) == board.pids
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not errors


# Helpers that fail.


def kill(board: Board) -> None:
    os.kill(board.pids[0], signal.SIGKILL)


@pytest.mark.parametrize("how", ["killed", "killed and reaped", "stopped", "raises"])
def test_a_helper_that_fails_costs_a_warning_and_not_the_result(
    how: str,
    new_board: Callable[..., Board],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def act(board: Board, row: int) -> None:
        if row == 0:
            if how == "raises":
                raise KeyError("planted")
            loop(board, row)

    def own() -> None:
        if how == "stopped":
            os.kill(board.pids[0], signal.SIGSTOP)
        elif how != "raises":
            kill(board)
            if how == "killed and reaped":
                os.waitpid(board.pids[0], 0)

    monkeypatch.setattr(module, "PATIENCE", 0.05 if how == "stopped" else PATIENCE)
    board = new_board(2, act)
    board.run(2, own)
    assert board.workers(2) == [os.getpid()] * 2
    assert board.helpers.have_failed
    assert not board.helpers.are_usable
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "goes on without helper processes" in record.message
    assert not any(state_of(pid) for pid in board.pids)
    # Whoever still has work to share does it alone.
    board.run(2, together=False)
    assert board.workers(2) == [os.getpid()] * 2
    assert len(caplog.records) == 1


def test_the_death_of_an_idle_helper_is_noticed(
    new_board: Callable[..., Board], caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the caller would take back every message, and work alone forever."""
    board = new_board(1)
    board.run()
    kill(board)
    wait_until(lambda: state_of(board.pids[0]) in ("Z", ""))
    board.run(together=False)
    assert board.helpers.have_failed
    assert len(caplog.records) == 1


def test_the_number_of_a_helper_that_ended_is_not_killed_again(
    new_board: Callable[..., Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the program has waited for it, another process may have got its number."""
    board, killed = new_board(1), []
    kill(board)
    os.waitpid(board.pids[0], 0)
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    board.helpers.close()
    assert not killed


def test_a_pause_of_the_whole_program_is_not_the_helpers_fault(
    new_board: Callable[..., Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on while both processes are stopped."""
    board = new_board(1, lambda board, row: wait_until(lambda: board.rows[0, COUNT]))
    clock, sleep = time.perf_counter, time.sleep
    late = 0.0

    def sleep_long(seconds: float) -> None:
        nonlocal late
        late += 1000.0
        board.rows[0, COUNT] = late > 5000
        sleep(seconds)

    def own() -> None:
        monkeypatch.setattr(module.time, "perf_counter", lambda: clock() + late)
        monkeypatch.setattr(module.time, "sleep", sleep_long)

    wait = wait_until
    board.rows[:] = 0
    board.helpers.run([pack(0, 10)], lambda: (wait(lambda: board.rows[0, HAS_BEGUN]), own()))
    assert board.rows[0, NUMBER] == 10
    assert not board.helpers.have_failed


def test_the_program_may_ignore_its_children(new_board: Callable[..., Board]) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        board = new_board(2, loop)
        board.run(2, lambda: kill(board))
        assert board.helpers.have_failed
        new_board(1).run()
        board = new_board(2)
        board.run(2)
        board.helpers.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_program_may_wait_for_the_helpers(new_board: Callable[..., Board]) -> None:
    """A thread reaps them as soon as they end."""
    first, second = new_board(1, loop), new_board(1)

    def reap() -> None:
        for pid in first.pids + second.pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    thread = threading.Thread(target=reap, daemon=True)
    thread.start()
    first.run(1, lambda: kill(first))
    second.run()
    assert second.workers() == second.pids
    first.helpers.close()
    second.helpers.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_the_program_may_close_all_its_files(new_board: Callable[..., Board]) -> None:
    """The helper cannot be woken then, so the caller does its messages."""
    board = new_board(1)
    board.sleep()
    os.close(board.helpers._helpers[0]._wake)
    board.run(together=False)
    assert board.workers() == [os.getpid()]


# The system's limits.


@pytest.mark.parametrize("what", ["fork", "eventfd", "pidfd_open", "mmap"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_start_that_fails_leaves_nothing(
    what: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num_calls = getattr(os, what, None), 0

    def fails_later(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > at:
            raise OSError(errno.EMFILE, "planted")
        return real(*arguments) if real else shared_zeros(*arguments)

    if what == "mmap":
        monkeypatch.setattr(module, "shared_zeros", fails_later)
    else:
        monkeypatch.setattr(os, what, fails_later)
    before, files = children(), open_files()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(OSError, match="planted"):
        HelperProcesses(2, lambda message: None)
    assert children() == before
    assert open_files() == files
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


# Interrupts.


def test_after_an_interrupt_no_helper_writes(new_board: Callable[..., Board]) -> None:
    def interrupt() -> None:
        wait_until(lambda: board.rows[0, COUNT] > 0 and board.rows[1, COUNT] > 0)
        raise KeyboardInterrupt

    board = new_board(2, loop)
    with pytest.raises(KeyboardInterrupt):
        board.run(2, interrupt)
    assert not any(state_of(pid) for pid in board.pids)
    assert not board.helpers.are_usable
    assert not board.helpers.have_failed


@pytest.mark.parametrize("second_call", [None, 2])
def test_an_interrupt_at_any_line_leaves_no_helper_at_work(second_call: int | None) -> None:
    """It comes while helpers start, work or end. A second one may come soon afterwards."""
    before, files = children(), open_files()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    num_interrupts = 0
    for line in range(1, 1000):
        boards: list[Board] = []

        def work(boards: list[Board] = boards) -> None:
            boards.append(Board(1))
            boards[0].run()
            boards[0].helpers.close()

        injector = Injector(KINDS["SIGINT"][0], line, second_call)
        try:
            injector.run(work)
        except KeyboardInterrupt:
            num_interrupts += 1
        for board in boards:
            # No helper is busy now, or nobody will give it anything.
            assert not board.helpers.are_usable or board.helpers._are_idle
            board.run(together=False)
            board.helpers.close()
        boards.clear()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
        if injector.num_lines < line:
            break
    gc.collect()
    assert num_interrupts > 50
    assert line < 999
    assert children() == before
    # Tracing also strikes between the two lines that forget and close a file. The interpreter does
    # not look for signals there.
    left = open_files() - files
    assert len(left) <= 4
    module._close(left)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_helpers_ignore_the_signals_of_a_terminal(
    number: int, new_board: Callable[..., Board]
) -> None:
    """These go to the whole process group."""
    board = new_board(1)
    os.kill(board.pids[0], number)
    board.run()
    assert board.workers() == board.pids


# The end.


@pytest.mark.parametrize("how", ["closed", "deleted"])
def test_helpers_end_with_the_object(how: str) -> None:
    def end_some() -> None:
        helpers = HelperProcesses(2, lambda message: None)
        pids = [helper._pid for helper in helpers._helpers]
        assert all(state_of(pid) for pid in pids)
        if how == "closed":
            helpers.close()
            helpers.close()  # no harm
        else:
            del helpers
        assert not any(state_of(pid) for pid in pids)

    num_maps = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(3):
        end_some()
    gc.collect()
    # The C library may keep a few regions of its own.
    assert len(Path("/proc/self/maps").read_text().splitlines()) < num_maps + 6


PROGRAM = """
import os, sys, time
from mie.ops_cpu.processes.helpers import HelperProcesses
helpers = HelperProcesses(2, lambda message: None)
child = os.fork() if sys.argv[1] == "with a child" else 0
if child or sys.argv[1] != "with a child":
    print(child, *[helper._pid for helper in helpers._helpers], flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["alone", "with a child"])
def test_helpers_end_when_the_program_is_killed(how: str) -> None:
    """So they do while a child of the program, which has all of its files, goes on."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        child, *pids = map(int, program.stdout.readline().split())
        try:
            assert all(state_of(pid) for pid in pids)
            program.kill()
            program.wait(PATIENCE)
            # Whoever adopts them may not wait for them.
            wait_until(lambda: all(state_of(pid) in ("Z", "") for pid in pids))
        finally:
            if child:
                os.kill(child, signal.SIGKILL)


def test_a_fork_of_the_program_has_no_helpers_and_leaves_the_parents_alone(
    new_board: Callable[..., Board],
) -> None:
    board = new_board(2)

    def action() -> None:
        nonlocal board
        assert not board.helpers.are_usable
        ran: list[int] = []
        board.helpers._do = lambda message: ran.append(unpack(message)[0])
        board.helpers.run([pack(0), pack(1)], lambda: ran.append(2))
        assert sorted(ran) == [0, 1, 2]
        board.helpers.close()
        del board
        gc.collect()

    assert exit_code_of_child(action) == 0
    board.run(2)
    assert board.workers(2) == board.pids


def test_helpers_hold_no_file_of_the_program_open(new_board: Callable[..., Board]) -> None:
    reading, writing = os.pipe()
    board = new_board(2)
    board.run(2)
    os.close(writing)
    os.set_blocking(reading, False)
    assert os.read(reading, 1) == b""
    os.close(reading)
    for pid in board.pids:
        files = [each for each in Path(f"/proc/{pid}/fd").iterdir() if each.name != "2"]
        names = [os.readlink(each) for each in files]
        assert len(names) == 2
        assert all(re.fullmatch(r".*(eventfd|pidfd).*", name) for name in names)
