"""The threads that share out work."""

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mie import EngineConfig
from mie.load import load_engine
from mie.ops_cpu import cpus, spin
from mie.ops_cpu import workers as workers_module
from mie.ops_cpu.workers import Workers


def helpers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "mie-worker"}


@pytest.fixture(params=["asleep", "awake", "both in turn"])
def step(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Workers], Any]:
    """What a round of tasks runs in. Busy waits are tried with more threads than CPUs, too."""
    monkeypatch.setattr(workers_module, "available_cpus", lambda: 64)
    turns = itertools.cycle({"asleep": [False], "awake": [True]}.get(request.param, [True, False]))
    return lambda workers: workers.awake() if next(turns) else contextlib.nullcontext()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_task_runs_once_a_round_and_in_its_own_thread(
    num_threads: int, step: Callable[[Workers], Any]
) -> None:
    workers = Workers(num_threads)
    rounds: list[dict[int, int]] = []
    for _ in range(25):
        with step(workers):
            for _ in range(2):
                ran: dict[int, int] = {}
                workers.run(lambda i, ran=ran: ran.update({i: threading.get_ident()}))
                rounds.append(ran)
    assert all(sorted(ran) == list(range(num_threads)) for ran in rounds)
    assert all(ran == rounds[0] for ran in rounds)
    assert len(set(rounds[0].values())) == num_threads
    assert rounds[0][0] == threading.get_ident()
    workers.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_a_task_raises_reaches_the_caller_after_all_are_done(
    failing: int, step: Callable[[Workers], Any]
) -> None:
    workers, ran = Workers(3), []

    def task(i: int) -> None:
        if i == failing:
            raise KeyError(i)
        ran.append(i)

    for _ in range(3):
        with pytest.raises(KeyError), step(workers):
            workers.run(task)
    assert sorted(ran) == sorted([i for i in range(3) if i != failing] * 3)
    workers.run(ran.append)
    workers.close()


def test_the_threads_end_with_the_workers() -> None:
    before = helpers()
    workers = Workers(4)
    new = helpers() - before
    assert len(new) == 3
    del workers
    gc.collect()
    for thread in new:
        thread.join(5)
    assert not any(thread.is_alive() for thread in new)


def test_fewer_threads_may_take_part() -> None:
    workers, ran = Workers(4), []
    workers.run(ran.append, 2)
    workers.run(ran.append, 1)
    assert sorted(ran) == [0, 0, 1]
    assert [workers.at_most(number) for number in (-1, 0, 3, 9)] == [1, 1, 3, 4]
    workers.close()


@pytest.mark.parametrize("when", ["in the task", "in the wait"])
def test_an_interrupt_waits_for_the_others(when: str) -> None:
    workers, finished = Workers(2), []
    main = threading.main_thread().ident
    assert main is not None

    def task(i: int) -> None:
        if i == 1:
            time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)
            finished.append(i)
        elif when == "in the task":
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        workers.run(task)
    assert finished == [1]
    workers.run(finished.append)
    assert sorted(finished) == [0, 1, 1]
    workers.close()


def test_interrupts_at_any_moment_leave_the_workers_usable(
    step: Callable[[Workers], Any],
) -> None:
    """A signal every 50 us, wherever it hits: no deadlock, and no task runs on unnoticed."""
    workers, running = Workers(2), [False] * 2

    def task(i: int) -> None:
        running[i] = True
        for _ in range(50):
            pass
        running[i] = False

    interrupted = 0
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(1000):
            try:
                with step(workers):
                    signal.setitimer(signal.ITIMER_REAL, 5e-5)
                    workers.run(task)
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
                assert not any(running[1:])
                running[0] = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert interrupted > 10
    workers.run(task)
    workers.close()


@pytest.mark.skipif(not spin.IS_AVAILABLE, reason="the C library has no pthread_spin_lock")
@pytest.mark.skipif(cpus.available_cpus() < 2, reason="needs two CPUs")
def test_threads_wait_busily_inside_awake_only() -> None:
    workers = Workers(2)
    ran: list[int] = []

    def seconds_of_cpu() -> float:
        """The helper's, while this thread sleeps for 0.2 s."""
        before = time.process_time()
        time.sleep(0.2)
        return time.process_time() - before

    with workers.awake():
        workers.run(ran.append)
        inside = seconds_of_cpu()
    outside = seconds_of_cpu()
    workers.run(ran.append)
    assert sorted(ran) == [0, 0, 1, 1]
    assert outside < 0.02 < 0.05 < inside
    workers.close()


def test_more_threads_than_cpus_never_wait_busily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "available_cpus", lambda: 1)
    workers = Workers(2)
    before = time.process_time()
    with workers.awake():
        workers.run(lambda _: None)
        time.sleep(0.2)
    assert time.process_time() - before < 0.05
    workers.close()


def test_threads_end_with_their_engine(tiny: dict[str, Any]) -> None:
    gc.collect()
    before = helpers()
    for _ in range(50):
        engine = load_engine(tiny["llama"].directory, EngineConfig(num_blocks=8, num_threads=3))
        del engine
        gc.collect()
    for thread in helpers() - before:
        thread.join(5)
    assert helpers() <= before


@pytest.mark.parametrize(
    ("quota", "wanted"),
    [(None, 8), ("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("-1 100000", 8)],
)
def test_threads_fit_the_quota(
    quota: str | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/unit/test_doctor.py has the files of either version."""
    files = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": quota}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert cpus.available_cpus(files.get) == wanted
