"""The threads that share out work."""

import gc
import threading

import pytest

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
