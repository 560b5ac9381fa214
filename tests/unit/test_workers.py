"""The threads that share out work."""

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest

from mie import EngineConfig
from mie.load import load_engine
from mie.ops_cpu import cpus
from mie.ops_cpu.workers import Workers


def helpers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "mie-worker"}


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_task_runs_once_a_round_and_in_its_own_thread(num_threads: int) -> None:
    workers = Workers(num_threads)
    rounds: list[dict[int, int]] = []
    for _ in range(50):
        ran: dict[int, int] = {}
        workers.run(lambda i, ran=ran: ran.update({i: threading.get_ident()}))
        rounds.append(ran)
    assert all(sorted(ran) == list(range(num_threads)) for ran in rounds)
    assert all(ran == rounds[0] for ran in rounds)
    assert len(set(rounds[0].values())) == num_threads
    assert rounds[0][0] == threading.get_ident()
    workers.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_a_task_raises_reaches_the_caller_after_all_are_done(failing: int) -> None:
    workers, ran = Workers(3), []

    def task(i: int) -> None:
        if i == failing:
            raise KeyError(i)
        ran.append(i)

    for _ in range(3):
        with pytest.raises(KeyError):
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


def test_interrupts_at_any_moment_leave_the_workers_usable() -> None:
    """A signal every 50 us, wherever it hits: no deadlock, and no task runs on unnoticed."""
    workers, running = Workers(3), [False] * 3

    def task(i: int) -> None:
        running[i] = True
        for _ in range(50):
            pass
        running[i] = False

    interrupted = 0
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(2000):
            try:
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
