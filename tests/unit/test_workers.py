"""Test the threads that share work."""

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from forks import exit_code_of_child

from mie import EngineConfig, SamplingParams
from mie.errors import ThreadLimitError
from mie.load.engine import load_engine
from mie.ops_cpu import attention, spin
from mie.ops_cpu import workers as workers_module
from mie.ops_cpu.workers import Workers
from mie.system.resources import available_cpus

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


@pytest.fixture
def helpers_get_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let helper threads exist while other programs keep all CPUs busy."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)


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
def test_each_task_runs_once_a_call(
    num_threads: int, new_workers: Callable[[int], Workers]
) -> None:
    workers = new_workers(num_threads)
    for _ in range(50):
        ran: list[int] = []
        run(workers, ran.append)
        assert sorted(ran) == list(range(num_threads))


@pytest.mark.parametrize("number", [None, 1, 2])
@pytest.mark.parametrize("num_items", [1, 2, 3, 20])
def test_each_item_goes_to_one_call(
    num_items: int, number: int | None, new_workers: Callable[[int], Workers]
) -> None:
    workers, items = new_workers(3), [f"item {i}" for i in range(num_items)]
    got: list[tuple[str, int]] = []
    workers.share(lambda item: got.append((item, threading.get_ident())), items, number)
    assert sorted(item for item, _ in got) == sorted(items)
    assert len({thread for _, thread in got}) <= min(number or 3, num_items)


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


@pytest.mark.usefixtures("helpers_get_no_cpu")
def test_the_caller_runs_tasks_that_no_helper_has_begun(
    new_workers: Callable[[int], Workers],
) -> None:
    workers, ran = new_workers(4), []
    for _ in range(3):
        run(workers, lambda index: ran.append((index, threading.get_ident())))
    assert sorted(ran) == sorted((i, threading.get_ident()) for i in range(4) for _ in range(3))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_a_task_reaches_the_caller_when_no_task_is_running(
    failing: int, new_workers: Callable[[int], Workers]
) -> None:
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


@pytest.mark.usefixtures("helpers_get_no_cpu")
def test_after_an_error_no_task_begins(new_workers: Callable[[int], Workers]) -> None:
    ran: list[int] = []

    def task(index: int) -> None:
        ran.append(index)
        raise KeyError

    with pytest.raises(KeyError):
        run(new_workers(3), task)
    assert ran == [0]


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


def test_there_may_be_fewer_tasks_than_threads(new_workers: Callable[[int], Workers]) -> None:
    workers, ran = new_workers(4), []
    workers.share(ran.append, range(2))
    workers.share(ran.append, range(1))
    workers.share(ran.append, range(0))
    assert sorted(ran) == [0, 0, 1]


def test_workers_keep_no_reference_to_finished_work(new_workers: Callable[[int], Workers]) -> None:
    class Large:
        def __call__(self, index: int) -> None:
            pass

    workers = new_workers(3)
    for _ in range(20):
        run(workers, Large())
    for helper in workers._helpers:
        helper.wait()
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Large)]


# Interrupts.


def test_an_interrupt_waits_for_the_helpers(
    new_workers: Callable[[int], Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes while the caller waits for a helper, or just before."""
    workers, meeting = new_workers(2), Meeting()
    main = threading.main_thread().ident
    assert main is not None

    def task(index: int) -> None:
        meeting.task(index)
        if index == 1:
            meeting.is_running = True
            signal.pthread_kill(main, signal.SIGINT)
            meeting.is_running = False

    wait = workers_module._Helper.wait

    def noticed(helper: Any) -> None:
        if meeting.has_begun.is_set():
            meeting.caller_waits.set()
        wait(helper)

    monkeypatch.setattr(workers_module._Helper, "wait", noticed)
    with pytest.raises(KeyboardInterrupt):
        run(workers, task)
    assert meeting.caller_waits.is_set()
    assert not meeting.is_running


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


def test_an_interrupt_at_any_bytecode_leaves_no_task_running_and_the_workers_usable(
    new_workers: Callable[[int], Workers],
) -> None:
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


@pytest.mark.usefixtures("helpers_get_no_cpu")
def test_an_interrupt_at_any_bytecode_while_no_helper_runs(
    new_workers: Callable[[int], Workers],
) -> None:
    workers = new_workers(3)
    for number in range(10_000):
        interrupt = Interrupt(number, before=lambda: None, at_wait=lambda: None)
        ran: list[int] = []
        with contextlib.suppress(KeyboardInterrupt):
            interrupt(lambda ran=ran: run(workers, ran.append))
        assert len(set(ran)) == len(ran)
        if not interrupt.has_come:
            assert ran == [0, 2, 1]
            break
        ran = []
        run(workers, ran.append)
        assert sorted(ran) == [0, 1, 2]
    assert 100 < number < 9999


# Waiting.


@pytest.mark.skipif(not spin.IS_AVAILABLE, reason="the C library has no spin locks or no lfind")
def test_a_spin_lock_is_waited_for_a_bounded_time() -> None:
    lock = spin.SpinLock()
    assert not lock.acquire(1)
    assert not lock.acquire(10_000)
    lock.release()
    lock.release()  # no harm
    assert lock.acquire(10_000)
    assert not lock.acquire(10_000)
    threading.Thread(target=lock.release).start()
    assert any(lock.acquire(10_000) for _ in iter(int, 1))  # loops forever if it never comes
    lock.release()
    lock.take()
    assert not lock.acquire(1)


def test_a_helper_that_has_waited_long_enough_sleeps(new_workers: Callable[[int], Workers]) -> None:
    [helper] = new_workers(2)._helpers
    while not helper._job.wake._is_asleep:
        os.sched_yield()
    ran: list[int] = []
    helper.start(workers_module._Work(ran.append, 2))
    while not ran:  # not `wait`, which takes back tasks that have not begun
        os.sched_yield()
    assert ran[0] == 1


def test_more_threads_than_cpus_never_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cpus, num_threads, spins in [(1, 2, False), (2, 2, spin.IS_AVAILABLE), (3, 4, False)]:
        monkeypatch.setattr(workers_module, "available_cpus", lambda num_cpus=num_cpus: num_cpus)
        workers = Workers(num_threads)
        signals = [s for each in workers._helpers for s in (each._job.wake, each._job.done)]
        assert {each._spin_lock is not None for each in signals} == {spins}
        workers.close()


# Forks.


def test_a_forked_child_has_threads_of_its_own(new_workers: Callable[[int], Workers]) -> None:
    workers = new_workers(3)
    run(workers, lambda _: None)

    def action() -> None:
        for _ in range(3):
            everyone = threading.Barrier(3)
            run(workers, lambda _, everyone=everyone: everyone.wait(PATIENCE))

    assert exit_code_of_child(action) == 0
    action()


def test_a_child_forked_while_tasks_run_has_usable_workers(
    new_workers: Callable[[int], Workers],
) -> None:
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


def test_an_engine_runs_in_a_forked_child(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "WORTH_SHARING", 1)  # so small a model would take one thread
    num_shared = 0

    class CountedWork(workers_module._Work):
        def __init__(self, run: Any, number: int) -> None:
            nonlocal num_shared
            num_shared += 1
            super().__init__(run, number)

    monkeypatch.setattr(workers_module, "_Work", CountedWork)
    config = EngineConfig(num_blocks=32, num_threads=2, block_size=4)
    engine = load_engine(tiny["llama"].directory, config, backend="numpy")
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)

    def tokens() -> list[list[int]]:
        ids = [engine.add_request(each, params) for each in ([1, 2, 3, 4, 5, 6, 7], [3, 1, 4])]
        tokens: dict[str, list[int]] = {each: [] for each in ids}
        while engine.has_work:
            for output in engine.step().outputs:
                tokens[output.request_id] += output.token_ids
        return [tokens[each] for each in ids]

    def action() -> None:
        nonlocal num_shared
        num_shared = 0
        assert tokens() == wanted
        assert num_shared > 0

    wanted = tokens()
    assert [len(each) for each in wanted] == [6, 6]
    assert exit_code_of_child(action) == 0
    action()


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


def test_threads_end_with_their_engine(tiny: dict[str, Any]) -> None:
    gc.collect()
    before = helpers()
    for _ in range(5):
        engine = load_engine(tiny["llama"].directory, EngineConfig(num_blocks=8, num_threads=3))
        del engine
        gc.collect()
    for thread in helpers() - before:
        thread.join(PATIENCE)
    assert helpers() <= before


@pytest.mark.parametrize(
    ("quota", "wanted"),
    [(None, 8), ("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("-1 100000", 8)],
)
def test_threads_fit_the_quota(
    quota: str | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check one quota. tests/unit/test_doctor.py has the files of either version."""
    files = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": quota}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert available_cpus(files.get) == wanted
