"""Test the helper processes alone, with work of a few numbers in shared memory."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forks import children, exit_code_of_child
from interrupts import KINDS, Injector

from mie.ops_cpu.allocator import shared_zeros
from mie.ops_cpu.processes import helpers as module
from mie.ops_cpu.processes.helpers import HelperProcesses, pack, unpack
from mie.ops_cpu.threads.spin import SpinLock

pytestmark = pytest.mark.skipif(
    not module.IS_AVAILABLE, reason="helper processes need Linux's eventfd and pidfd"
)
PATIENCE = 120.0
"""Seconds after which a wait has failed. Waits that succeed take no time."""
ENTRIES = 2
"""Numbers of a task in memory: who did it, and its number."""
WHO, NUMBER = range(ENTRIES)
NUM_PARTS = 2
BEFORE, WITHIN = "before", "within"
"""Places of a step: before a part of it, or within the task of a part."""


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


def open_files() -> set[int]:
    # The listing's own file is closed by the time that it is looked at.
    names = os.listdir("/proc/self/fd")
    return {int(name) for name in names if os.path.lexists(f"/proc/self/fd/{name}")}


class Board:
    """Shared memory that steps fill in parts, a row each, and the processes that do so.

    In each part of a step, each process has a task: it writes who it is and a number into its place
    of the row.
    """

    def __init__(
        self, number: int = 2, act: Callable[[Board, int, str, int], object] | None = None
    ) -> None:
        """Start the helpers. All processes call act(board, rank, place, part), if there is one."""
        self.rows = shared_zeros((ENTRIES, NUM_PARTS, number), np.int64)
        self.flags = shared_zeros((8,), np.int64)
        self.done: list[tuple[int, int]] = []
        """The part and the rank of each task that this process has done."""
        self._act = act
        self.helpers = HelperProcesses(number)
        self.helpers.start(lambda message: self._step(unpack(message)[0]))
        self.pids = [helper._pid for helper in self.helpers._helpers]

    def run(self, value: int = 10, own: Callable[[], object] = lambda: None) -> None:
        """Run a step, and check the results."""
        self.rows[:] = 0
        self.done.clear()
        self.helpers.run(pack(value), lambda: (own(), self._step(value)))
        assert self.rows[NUMBER].tolist() == [
            [value + 10 * part + rank for rank in range(self.helpers.number)]
            for part in range(NUM_PARTS)
        ]
        assert len(self.done) == len(set(self.done))

    def _step(self, value: int) -> None:
        rank = self.helpers.rank
        for part in range(NUM_PARTS):
            self._reach(rank, BEFORE, part)
            tasks = [partial(self._do, value, part, i) for i in range(self.helpers.number)]
            self.helpers.share(tasks)
        self._reach(rank, BEFORE, NUM_PARTS)

    def _do(self, value: int, part: int, rank: int) -> None:
        if rank == self.helpers.rank:
            self._reach(rank, WITHIN, part)
        self.rows[:, part, rank] = os.getpid(), value + 10 * part + rank
        self.done.append((part, rank))

    def _reach(self, *place: Any) -> None:
        if self._act is not None:
            self._act(self, *place)

    def sleep(self) -> None:
        """Wait until all helpers sleep."""
        self.run()
        helpers = self.helpers._helpers
        wait_until(lambda: all(each._is_asleep[0] == 1 for each in helpers))
        wait_until(lambda: all(state_of(pid) == "S" for pid in self.pids))

    def workers(self) -> list[list[int]]:
        """Return which process did each task, for each part."""
        return self.rows[WHO].tolist()

    @property
    def all_pids(self) -> list[int]:
        return [os.getpid(), *self.pids]

    def check_all_share(self) -> None:
        assert self.workers() == [self.all_pids] * NUM_PARTS
        assert self.done == [(part, 0) for part in range(NUM_PARTS)]

    def check_caller_is_alone(self, first_part: int = 0) -> None:
        assert self.workers()[:first_part] == [self.all_pids] * first_part
        alone = [os.getpid()] * self.helpers.number
        assert self.workers()[first_part:] == [alone] * (NUM_PARTS - first_part)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    gc.collect()
    before, files = children(), open_files()
    yield
    gc.collect()
    assert children() <= before
    assert open_files() <= files


@pytest.fixture(autouse=True)
def _is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", PATIENCE)


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


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collect how long the caller sleeps each time that it waits longer for helpers."""
    slept: list[float] = []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | {"sleep": noted}))
    return slept


# Sharing work.


@pytest.mark.parametrize("number", [2, 3, 5])
def test_each_process_does_its_tasks(number: int, new_board: Callable[..., Board]) -> None:
    board = new_board(number)
    for value in range(50):
        board.run(value)
        board.check_all_share()
    assert board.helpers.are_usable


def test_one_process_alone_needs_no_helpers(new_board: Callable[..., Board]) -> None:
    board = new_board(1)
    assert board.pids == []
    board.run()
    board.check_caller_is_alone()


def test_without_a_start_the_caller_does_all_tasks() -> None:
    helpers, done = HelperProcesses(3), []
    tasks = [partial(done.append, i) for i in range(3)]
    assert not helpers.are_usable
    assert helpers.run(pack(0), lambda: helpers.share(tasks) or "result") == "result"
    assert done == [0, 1, 2]


def test_tasks_outside_a_step_are_done_by_the_caller(new_board: Callable[..., Board]) -> None:
    board, done = new_board(2), []
    for _ in range(2):
        board.helpers.share([partial(done.append, i) for i in range(2)])
        board.run()
        board.check_all_share()
    assert done == [0, 1, 0, 1]


def test_messages_carry_eight_numbers() -> None:
    assert unpack(pack(1, -2, 1 << 40)) == (1, -2, 1 << 40, 0, 0, 0, 0, 0)
    assert unpack(pack(*range(8))) == tuple(range(8))
    with pytest.raises(struct.error):
        pack(*range(9))


def test_a_helper_gets_the_whole_message(new_board: Callable[..., Board]) -> None:
    flags = shared_zeros((8,), np.int64)
    helpers = HelperProcesses(2)
    helpers.start(lambda message: flags.__setitem__(slice(None), unpack(message)))
    try:
        for sign in (1, -1):
            numbers = [sign * (each + (1 << 40)) for each in range(8)]
            assert helpers.run(pack(*numbers), lambda: "result") == "result"
            assert flags.tolist() == numbers
    finally:
        helpers.close()


def test_a_sleeping_helper_is_woken(new_board: Callable[..., Board]) -> None:
    board = new_board(3)
    for _ in range(3):
        board.sleep()
        board.run()
        board.check_all_share()


def test_a_helper_that_falls_asleep_as_it_gets_a_message_is_woken(
    new_board: Callable[..., Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller saw it awake, and the helper saw no message."""
    board = new_board(3)

    def give(helper: Any, message: bytes) -> None:
        helper._message[:] = message
        helper._given.release()

    monkeypatch.setattr(module._Helper, "give", give)
    for _ in range(3):
        board.sleep()
        board.run()
        board.check_all_share()


def test_it_works_from_any_thread_and_beside_others(new_board: Callable[..., Board]) -> None:
    errors: list[BaseException] = []
    shared = new_board(2)

    def work(board: Board) -> None:
        try:
            for _ in range(10):
                board.run()
                board.check_all_share()
        except BaseException as error:
            errors.append(error)

    def in_threads(*actions: Callable[[], object]) -> None:
        threads = [threading.Thread(target=action) for action in actions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

    for _ in range(3):
        in_threads(lambda: work(shared))
    in_threads(*[lambda: work(new_board(2))] * 3)
    assert not errors


def test_all_processes_know_where_each_share_begins(new_board: Callable[..., Board]) -> None:
    """The caller alone decides when borders move. All of them move at the same step."""
    known = shared_zeros((3,), np.int64)

    def act(board: Board, rank: int, place: str, part: int) -> None:
        if (place, part) == (WITHIN, 0):
            known[rank] = board.helpers.ends[1]

    board = new_board(3, act)
    for border in (10, 10, 40, 40):
        board.helpers._balance.ends = [0, border, 50, 64]
        board.run()  # the next step uses them
        board.run()
        assert known.tolist() == [border] * 3


def test_each_process_says_how_long_it_worked_and_waited(
    new_board: Callable[..., Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[Any, Any]] = []
    board = new_board(2)
    monkeypatch.setattr(board.helpers._balance, "note", lambda *each: noted.append(each))
    for _ in range(3):
        board.run()
    assert len(noted) == 3
    for works, waits in noted:
        assert len(works) == len(waits) == 2
        assert min(works) > 0
        assert min(waits) > 0


# Helpers that fail.


def fail(board: Board, how: str) -> None:
    if how == "raises":
        raise KeyError("planted")
    os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)


PLACES = [(BEFORE, 0), (WITHIN, 0), (BEFORE, 1), (WITHIN, 1), (BEFORE, NUM_PARTS)]


@pytest.mark.parametrize("how", ["killed", "killed and reaped", "stopped", "raises"])
@pytest.mark.parametrize("where", PLACES, ids=lambda where: f"{where[0]} {where[1]}")
def test_a_helper_that_fails_costs_a_warning_and_not_the_result(
    how: str,
    where: tuple[str, int],
    new_board: Callable[..., Board],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caller = os.getpid()

    def act(board: Board, rank: int, *place: Any) -> None:
        if place != where or not board.flags[0]:
            return
        if rank == 1:
            fail(board, how)
        elif os.getpid() == caller and board.helpers._end.alive:
            [victim, _] = board.pids
            if how == "stopped":
                wait_until(lambda: state_of(victim) == "T")
                monkeypatch.setattr(module, "PATIENCE", 0.05)
            elif how == "killed and reaped":
                os.waitpid(victim, 0)

    board = new_board(3, act)
    board.run()
    board.flags[0] = 1
    board.run()
    board.check_caller_is_alone(where[1])
    assert board.helpers.have_failed
    assert not board.helpers.are_usable
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "goes on without helper processes" in record.message
    assert not any(state_of(pid) for pid in board.pids)
    # Whoever still has work to share does it alone.
    for _ in range(2):
        board.run()
        board.check_caller_is_alone()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("meeting", range(3))
@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_helper_may_die_within_a_meeting(
    rank: int, meeting: int, num_signals: int, new_board: Callable[..., Board]
) -> None:
    """Some processes may pass this meeting then, and others not."""

    def act(board: Board, own: int, place: str, part: int) -> None:
        if own != rank or not board.flags[0] or (place, part) != (BEFORE, meeting):
            return
        barrier = board.helpers._barrier
        turns = barrier._steps[barrier._turn]
        turns[num_signals - 1] = DiesAfterSignal(turns[num_signals - 1][0]), None

    board = new_board(3, act)
    board.run()
    board.flags[0] = 1
    board.run()  # checks the results
    if not board.helpers.have_failed:  # the caller did not need it any more
        assert meeting == NUM_PARTS
        board.run()
    assert board.helpers.have_failed
    board.run()
    board.check_caller_is_alone()


class DiesAfterSignal:
    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def release(self) -> None:
        self._lock.release()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_reaped", [False, True])
def test_the_death_of_an_idle_helper_is_noticed(
    is_reaped: bool, new_board: Callable[..., Board], caplog: pytest.LogCaptureFixture
) -> None:
    board = new_board(3)
    board.run()
    os.kill(board.pids[1], signal.SIGKILL)
    if is_reaped:
        os.waitpid(board.pids[1], 0)
    else:
        wait_until(lambda: state_of(board.pids[1]) == "Z")
    board.run()
    board.check_caller_is_alone()
    assert board.helpers.have_failed
    assert len(caplog.records) == 1


def test_a_helper_that_sleeps_may_be_stopped_for_a_while(new_board: Callable[..., Board]) -> None:
    board = new_board(2)
    board.sleep()
    os.kill(board.pids[0], signal.SIGSTOP)
    wait_until(lambda: state_of(board.pids[0]) == "T")
    timer = threading.Timer(0.05, lambda: os.kill(board.pids[0], signal.SIGCONT))
    timer.start()
    board.run()
    timer.join()
    board.check_all_share()
    assert board.helpers.are_usable


def test_the_number_of_a_helper_that_ended_is_not_killed_again(
    new_board: Callable[..., Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the program has waited for it, another process may have got its number."""
    board, killed = new_board(2), []
    os.kill(board.pids[0], signal.SIGKILL)
    os.waitpid(board.pids[0], 0)
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    board.helpers.close()
    assert not killed


def test_another_thread_may_wait_for_a_helper_just_before_it_is_killed(
    new_board: Callable[..., Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    board, kill = new_board(3), os.kill

    def kill_late(pid: int, number: int) -> None:
        kill(pid, number)
        os.waitpid(pid, 0)
        kill(pid, number)

    monkeypatch.setattr(os, "kill", kill_late)
    board.helpers.close()
    assert not any(state_of(pid) for pid in board.pids)


def test_a_program_that_may_no_longer_kill_its_helpers_goes_on(
    new_board: Callable[..., Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have changed its user. The helpers end with it."""
    board = new_board(2)

    def forbidden(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", forbidden)
        board.helpers.close()
    assert not board.helpers.are_usable
    os.kill(board.pids[0], signal.SIGKILL)
    os.waitpid(board.pids[0], 0)


def test_a_pause_of_the_whole_program_is_not_the_helpers_fault(
    new_board: Callable[..., Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes on while all processes are stopped."""
    caller, late = os.getpid(), 0.0

    def act(board: Board, rank: int, place: str, part: int) -> None:
        if rank == 1 and (place, part) == (WITHIN, 1):
            wait_until(lambda: board.flags[0])
        if os.getpid() == caller and (place, part) == (WITHIN, 1):
            monkeypatch.setattr(module, "time", late_time)

    def sleep_long(seconds: float) -> None:
        nonlocal late
        late += 1000.0
        board.flags[0] = late > 5000
        time.sleep(seconds)

    def late_clock(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + late

    clocks = {name: late_clock(getattr(time, name)) for name in ("perf_counter", "monotonic")}
    late_time = SimpleNamespace(**clocks, sleep=sleep_long)
    board = new_board(2, act)
    board.run()
    board.check_all_share()
    assert late > 5000
    assert not board.helpers.have_failed


def test_the_program_may_ignore_its_children(new_board: Callable[..., Board]) -> None:
    def act(board: Board, rank: int, place: str, part: int) -> None:
        if rank == 1 and (place, part) == (WITHIN, 1):
            fail(board, "killed")

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        board = new_board(3, act)
        board.run()
        board.check_caller_is_alone(1)
        assert board.helpers.have_failed
        board = new_board(3)
        board.run()
        board.check_all_share()
        board.helpers.close()
        # With SIGCHLD ignored, waitpid may return just before Linux removes the process.
        wait_until(lambda: not any(state_of(pid) for pid in board.pids))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_program_may_wait_for_the_helpers(new_board: Callable[..., Board]) -> None:
    """A thread reaps them as soon as they end."""
    first = new_board(2, lambda board, rank, *place: rank and fail(board, "killed"))
    second = new_board(2)

    def reap() -> None:
        for pid in first.pids + second.pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    thread = threading.Thread(target=reap, daemon=True)
    thread.start()
    first.run()
    first.check_caller_is_alone()
    second.run()
    second.check_all_share()
    first.helpers.close()
    second.helpers.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_the_program_may_close_all_its_files(
    new_board: Callable[..., Board], naps: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """The helpers cannot be woken then, so the caller soon goes on alone."""
    board = new_board(3)
    board.sleep()
    for helper in board.helpers._helpers:
        os.close(helper._wake)
    naps.clear()
    board.run()
    board.check_caller_is_alone()
    assert len(naps) < 10
    assert "cannot be woken up" in caplog.text


def test_another_thread_may_end_the_helpers_within_a_step(
    new_board: Callable[..., Board], naps: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """The caller would wait in vain. Nobody is to blame."""
    caller = os.getpid()

    def act(board: Board, rank: int, place: str, part: int) -> None:
        if os.getpid() == caller and board.helpers._end.alive and (place, part) == (WITHIN, 1):
            naps.clear()
            thread = threading.Thread(target=board.helpers.close)
            thread.start()
            thread.join(PATIENCE)
        elif rank == 1 and (place, part) == (WITHIN, 1):
            time.sleep(PATIENCE)

    board = new_board(2, act)
    board.run()
    board.check_caller_is_alone(1)
    assert len(naps) < 10
    assert not board.helpers.are_usable
    assert not board.helpers.have_failed
    assert not caplog.records


def test_helpers_of_a_suspended_program_take_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z stops the caller, and helpers ignore it."""
    helpers, slept = HelperProcesses(2), []
    helpers.rank = 1  # as in a helper
    parents = chain([helpers._pid] * 5000, repeat(1))
    clock = SimpleNamespace(sleep=slept.append, perf_counter=time.perf_counter)
    helpers._helper_tries = 1
    with monkeypatch.context() as patch:
        patch.setattr(module, "time", clock)
        patch.setattr(os, "getppid", lambda: next(parents))
        with pytest.raises(SystemExit):
            helpers._wait_longer(SpinLock())
    assert len(slept) == 5000
    assert slept[:100] == [module.NAP] * 100  # a helper that is waited for is not late
    assert sum(slept) > 10 * module.HELPER_SPINS * len(slept)
    assert max(slept) < 1  # it ends soon after the caller


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

    helpers = HelperProcesses(3)
    if what == "mmap":
        monkeypatch.setattr(module, "shared_zeros", fails_later)
    else:
        monkeypatch.setattr(os, what, fails_later)
    before, files = children(), open_files()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(OSError, match="planted"):
        helpers.start(lambda message: None)
    assert children() == before
    assert open_files() == files
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert not helpers.are_usable
    assert helpers.run(pack(0), lambda: 5) == 5


# Interrupts.


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", PLACES, ids=lambda where: f"{where[0]} {where[1]}")
def test_after_an_exception_no_helper_writes(
    error: type[BaseException],
    where: tuple[str, int],
    new_board: Callable[..., Board],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The helpers may count in a task, or wait for the caller."""
    caller = os.getpid()

    def act(board: Board, rank: int, *place: Any) -> None:
        if place != where or not board.flags[0]:
            return
        if os.getpid() == caller:
            wait_until(lambda: board.flags[1])
            raise error("planted")
        board.flags[rank] = 1
        while rank == 1:
            board.flags[2] += 1

    board = new_board(2, act)
    board.flags[0] = 1
    with pytest.raises(error, match="planted"):
        board.run()
    assert not any(state_of(pid) for pid in board.pids)
    assert not board.helpers.are_usable
    assert not board.helpers.have_failed
    assert not caplog.records
    board.flags[0] = 0
    board.run()
    board.check_caller_is_alone()


def test_a_second_interrupt_leaves_no_step_unfinished(new_board: Callable[..., Board]) -> None:
    """It comes when the first one is about to end the helpers, which wait for the caller."""

    def interrupt() -> None:
        wait_until(lambda: board.rows[NUMBER, 0, 1:].all())
        board.helpers.close = interrupted_close
        raise KeyboardInterrupt

    def interrupted_close() -> None:
        del board.helpers.close
        raise KeyboardInterrupt

    board, ended = new_board(3), []
    with pytest.raises(KeyboardInterrupt):
        board.run(own=interrupt)
    assert not board.helpers.are_usable
    board.run(20, lambda: ended.extend(not state_of(pid) for pid in board.pids))
    assert ended == [True, True]  # before this step began
    board.check_caller_is_alone()


@pytest.mark.parametrize(
    ("second_call", "every"),
    [
        (None, 4),
        (2, 4),
        *(pytest.param(call, 1, marks=pytest.mark.slow) for call in (None, 1, 2, 3)),
    ],
)
def test_an_interrupt_at_any_line_leaves_no_helper_at_work(
    second_call: int | None, every: int
) -> None:
    """It comes while helpers start, work or end. A second one may come soon afterwards."""
    before, files = children(), open_files()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    num_interrupts = 0
    for line in range(1, 1000, every):
        boards: list[Board] = []

        def work(boards: list[Board] = boards) -> None:
            boards.append(Board(2))
            boards[0].run()
            boards[0].helpers.close()

        injector = Injector(KINDS["SIGINT"][0], line, second_call)
        try:
            injector.run(work)
        except KeyboardInterrupt:
            num_interrupts += 1
        for board in boards:
            if second_call is None:
                # No helper is busy now, or there is none.
                assert board.helpers.are_usable or not any(map(state_of, board.pids))
            board.run()
            board.helpers.close()
        boards.clear()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
        if injector.num_lines < line:
            break
    gc.collect()
    assert num_interrupts > 100 / every
    assert line < 990
    assert children() == before
    # Tracing also strikes between the two lines that forget and close a file. The interpreter does
    # not look for signals there.
    left = open_files() - files
    assert len(left) <= 4
    module._close(left)


def test_an_interrupt_through_another_thread_does_not_change_the_signal_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes although this thread blocks all signals."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    close = module._close

    def interrupted(files: Any) -> None:
        close(files)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_close", interrupted)
    helpers = HelperProcesses(2)
    with pytest.raises(KeyboardInterrupt):
        helpers.start(lambda message: None)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert not helpers.are_usable


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_helpers_ignore_the_signals_of_a_terminal(
    number: int, new_board: Callable[..., Board]
) -> None:
    """These go to the whole process group."""
    board = new_board(2)
    os.kill(board.pids[0], number)
    board.run()
    board.check_all_share()


# The end.


@pytest.mark.parametrize("how", ["closed", "deleted"])
def test_helpers_end_with_the_object(how: str) -> None:
    def end_some() -> None:
        helpers = HelperProcesses(3)
        helpers.start(lambda message: None)
        helpers.run(pack(0), lambda: None)
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
import os, sys, threading, time
import numpy as np
from mie.ops_cpu.allocator import shared_zeros
from mie.ops_cpu.processes.helpers import HelperProcesses, pack
_, where, how = sys.argv
flags = shared_zeros((3,), np.int64)
helpers = HelperProcesses(3)

def begin():
    helpers.share([lambda rank=rank: flags.__setitem__(rank, 1) for rank in range(3)])

def step(message):
    begin()
    flags[helpers.rank] = 2
    helpers.share([lambda: None] * 3)

begun = threading.Event()

def own():
    begin()
    while flags.tolist() != [1, 2, 2]:
        time.sleep(0.001)
    if where == "thread":
        begun.set()
        helpers.share([lambda: time.sleep(0.2)] * 3)
    else:
        wait()

def wait():
    child = os.fork() if how == "with a child" else 0
    if child or how != "with a child":
        print(child, *[helper._pid for helper in helpers._helpers], flush=True)
    if how != "exits":
        time.sleep(1000)

helpers.start(step)
if where == "thread":
    threading.Thread(target=helpers.run, args=(pack(0), own), daemon=True).start()
    begun.wait()
wait() if where != "step" else helpers.run(pack(0), own)
"""


@pytest.mark.parametrize("has_child", ["alone", "with a child"])
@pytest.mark.parametrize("where", ["idle", "step"])
def test_helpers_end_when_the_program_is_killed(where: str, has_child: str) -> None:
    """So they do while a child of the program, which has all of its files, goes on.

    They sleep, or wait for the caller within a step.
    """
    command = [sys.executable, "-c", PROGRAM, where, has_child]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
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


@pytest.mark.parametrize("where", ["idle", "step", "thread"])
def test_helpers_end_when_the_program_exits(where: str) -> None:
    """A thread of it may be within a step, and wait for a helper that is no longer there."""
    command = [sys.executable, "-c", PROGRAM, where, "exits"]
    program = subprocess.run(command, capture_output=True, timeout=PATIENCE)
    assert (program.returncode, program.stderr) == (0, b"")
    _, *pids = map(int, program.stdout.split())
    assert len(pids) == 2
    assert not any(state_of(pid) for pid in pids)


@pytest.mark.parametrize("where", ["idle", "step"])
def test_a_fork_of_the_program_has_no_helpers_and_leaves_the_parents_alone(
    where: str, new_board: Callable[..., Board]
) -> None:
    """A thread may fork while another one is within a step."""
    caller = os.getpid()

    def action() -> None:
        nonlocal board
        helpers, done = board.helpers, []
        assert not helpers.are_usable
        tasks = [partial(done.append, i) for i in range(3)]
        helpers.run(pack(0), partial(helpers.share, tasks))
        assert done == [0, 1, 2]
        helpers.close()
        del board, helpers
        gc.collect()

    def act(board: Board, rank: int, place: str, part: int) -> None:
        if where == "step" and os.getpid() == caller and (place, part) == (BEFORE, 1):
            assert exit_code_of_child(action) == 0

    board = new_board(3, act)
    for _ in range(2):
        if where == "idle":
            assert exit_code_of_child(action) == 0
        board.run()
        board.check_all_share()


def test_helpers_hold_no_file_of_the_program_open(new_board: Callable[..., Board]) -> None:
    reading, writing = os.pipe()
    board = new_board(3)
    board.run()
    os.close(writing)
    os.set_blocking(reading, False)
    assert os.read(reading, 1) == b""
    os.close(reading)
    for pid in board.pids:
        files = [each for each in Path(f"/proc/{pid}/fd").iterdir() if each.name != "2"]
        names = [os.readlink(each) for each in files]
        assert len(names) == 2
        assert all(re.fullmatch(r".*(eventfd|pidfd).*", name) for name in names)


@pytest.mark.parametrize(("worked", "wanted"), [(0.0, 1.0), (0.1, 1.0), (2.0, 16.0)])
def test_a_helper_may_take_several_times_as_long_as_the_caller_did(
    worked: float, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers, num_looks, now = HelperProcesses(2), 0, 100.0
    monkeypatch.setattr(module, "PATIENCE", 1.0)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)

    def look(_: int) -> bool:
        nonlocal num_looks
        num_looks += 1
        return False

    helpers._begin()
    now += worked
    with pytest.raises(module._HelperEnded, match=f"took over {wanted:g} s"):
        helpers._wait_longer(SimpleNamespace(acquire=look))  # type: ignore[arg-type]
    assert num_looks == int(wanted / (module.CALLER_SPINS + module.NAP))
    helpers.close()
