"""Test the threads that share work."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from forks import exit_code_of_child

from mie.errors import ThreadLimitError
from mie.ops_cpu import workers as workers_module
from mie.ops_cpu.workers import Workers

PATIENCE = 120.0
"""Seconds after which a wait has failed. Waits that succeed take no time."""


def helpers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "mie-worker"}


@pytest.fixture(params=["spinning", "asleep"])
def new_workers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], Workers]]:
    """Make workers that wait in either way, and with more threads than CPUs too."""
    monkeypatch.setattr(
        workers_module, "available_cpus", lambda: 64 if request.param == "spinning" else 1
    )
    made: list[Workers] = []

    def new(num_threads: int) -> Workers:
        made.append(Workers(num_threads))
        return made[-1]

    yield new
    for workers in made:
        workers.close()


def run(workers: Workers, task: Callable[[int], object]) -> None:
    """Call the task once for each thread."""
    workers.share(task, range(workers.num_threads))


class Meeting:
    """Tasks that meet.

    The first ends when all others have begun, and those end when the caller waits for them.
    """

    def __init__(self) -> None:
        self.has_begun, self.caller_waits = threading.Event(), threading.Event()
        self.is_running = False
        self.thread = 0

    def task(self, index: int) -> None:
        if index == 0:
            assert self.has_begun.wait(PATIENCE)
            return
        self.is_running, self.thread = True, threading.get_ident()
        self.has_begun.set()
        assert self.caller_waits.wait(PATIENCE)
        self.is_running = False


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_task_runs_once_a_call(num_threads, new_workers) -> None:
    workers = new_workers(num_threads)
    for _ in range(50):
        ran: list[int] = []
        run(workers, ran.append)
        assert sorted(ran) == list(range(num_threads))


def test_tasks_run_side_by_side(new_workers: Callable[[int], Workers]) -> None:
    workers = new_workers(4)
    everyone = threading.Barrier(4)
    threads: dict[int, int] = {}

    def task(index: int) -> None:
        threads[index] = threading.get_ident()
        everyone.wait(PATIENCE)  # users of Workers must not do this: one thread may run two tasks

    for _ in range(20):
        run(workers, task)
        assert threads[0] == threading.get_ident()
        assert len(set(threads.values())) == 4


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_a_task_reaches_the_caller_when_no_task_is_running(failing, new_workers):
    workers, everyone = new_workers(3), threading.Barrier(3)
    ended: list[int] = []

    def task(index: int) -> None:
        everyone.wait(PATIENCE)
        if index == failing:
            raise KeyError(index)
        ended.append(index)

    for _ in range(3):
        ended.clear()
        with pytest.raises(KeyError, match=str(failing)):
            run(workers, task)
        assert sorted(ended) == [i for i in range(3) if i != failing]
    ran: list[int] = []
    run(workers, ran.append)
    assert sorted(ran) == [0, 1, 2]


def test_the_threads_end_with_the_workers() -> None:
    before = helpers()
    workers = Workers(4)
    new = helpers() - before
    assert len(new) == 3
    del workers
    gc.collect()
    for thread in new:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in new)


# Interrupts.


class Interrupt:
    """Raises KeyboardInterrupt in this thread before the n-th bytecode of workers.py.

    CPython looks for signals at some bytecodes only, such as calls and jumps back. Those are among
    the ones tried here.
    """

    def __init__(
        self, number: int, before: Callable[[], None], at_wait: Callable[[], None]
    ) -> None:
        self.has_come = False
        self._number, self._before, self._at_wait = number, before, at_wait

    def __call__(self, task: Callable[[], None]) -> None:
        tracer = sys.gettrace()
        sys.settrace(self._trace)
        try:
            task()
        finally:
            sys.settrace(tracer)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != workers_module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "call" and frame.f_code is workers_module._Signal.wait.__code__:
            self._at_wait()
        if event == "opcode":
            self._number -= 1
            if self._number < 0:
                self.has_come = True
                self._before()
                raise KeyboardInterrupt
        return self._trace


def test_an_interrupt_at_any_bytecode_leaves_no_task_running_and_the_workers_usable(new_workers):
    workers = new_workers(2)
    for number in range(10_000):
        meeting = Meeting()
        let_go = meeting.caller_waits.set
        interrupt = Interrupt(number, before=let_go, at_wait=let_go)
        try:
            interrupt(lambda meeting=meeting: run(workers, meeting.task))
        except KeyboardInterrupt:
            assert not meeting.is_running
        if not interrupt.has_come:
            assert not meeting.is_running
            assert meeting.thread != threading.get_ident()
            break
        ran: list[int] = []
        run(workers, ran.append)
        assert sorted(ran) == [0, 1]
    assert 200 < number < 9999  # it has tried them all


# Forks.


def test_a_child_forked_while_tasks_run_has_usable_workers(new_workers) -> None:
    """Another thread is inside `run`, and so is the helper. Neither exists in the child."""
    workers, meeting = new_workers(2), Meeting()
    caller = threading.Thread(target=run, args=(workers, meeting.task))
    caller.start()
    assert meeting.has_begun.wait(PATIENCE)

    def action() -> None:
        both = threading.Barrier(2)
        run(workers, lambda _: both.wait(PATIENCE))
        workers.close()

    assert exit_code_of_child(action) == 0
    meeting.caller_waits.set()
    caller.join(PATIENCE)
    assert not caller.is_alive()


def test_a_thread_that_the_system_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start, started = helpers(), threading.Thread.start, []

    def refuse_the_third(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_third)
    with pytest.raises(ThreadLimitError):
        Workers(5)
    monkeypatch.undo()
    gc.collect()
    for thread in helpers() - before:
        thread.join(PATIENCE)
    assert helpers() <= before
