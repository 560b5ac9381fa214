"""Test the barrier with threads of one process and with forked ones."""

from __future__ import annotations

import copy
import os
import random
import signal
import time
import warnings

import numpy as np
import pytest

from mie.ops_cpu.allocator import shared_zeros
from mie.ops_cpu.processes.barrier import Barrier
from mie.ops_cpu.processes.helpers import IS_AVAILABLE
from mie.ops_cpu.threads.spin import SpinLock

pytestmark = pytest.mark.skipif(not IS_AVAILABLE, reason="the barrier needs Linux's spin locks")
PATIENCE = 120
"""Seconds after which processes count as hung."""


class Stop(Exception):
    """A process waits."""


def stop(lock: SpinLock) -> None:
    raise Stop


def joined(barrier: Barrier, rank: int) -> Barrier:
    """Return the barrier as another process has it after a fork."""
    made = copy.copy(barrier)
    made.join(rank)
    return made


def test_one_process_alone_never_waits() -> None:
    barrier = Barrier(1)
    for _ in range(3):
        barrier.meet(1, stop)


@pytest.mark.parametrize("number", [2, 3, 4, 5])
@pytest.mark.parametrize("absent", [0, 1, -1])
def test_nobody_passes_while_one_process_is_absent(number: int, absent: int) -> None:
    """Each process waits as far as it can, and looks again after the others did."""
    barrier, passed = Barrier(number), []
    absent %= number

    def meet(ranks: list[int]) -> None:
        if not ranks:
            return
        *others, rank = ranks
        has_waited = False

        def wait(lock: SpinLock) -> None:
            nonlocal has_waited
            if not has_waited:
                has_waited = True
                meet(others)
            if not lock.take():
                raise Stop

        try:
            joined(barrier, rank).meet(1, wait)
            passed.append(rank)
        except Stop:
            meet(others if not has_waited else [])

    meet([rank for rank in range(number) if rank != absent])
    assert passed == []


def test_a_process_may_be_one_meeting_ahead() -> None:
    """Its signal of the next meeting does not count for this one, and is not lost."""
    first = Barrier(2)
    second = joined(first, 1)

    def let_first_go_ahead(lock: SpinLock) -> None:
        first.meet(1, stop)
        with pytest.raises(Stop):
            first.meet(1, stop)
        assert lock.take()

    second.meet(0, let_first_go_ahead)  # waits as if the first process was late
    second.meet(1, stop)  # the first process is here already
    with pytest.raises(Stop):
        second.meet(1, stop)


@pytest.mark.parametrize("number", [2, 3, 5])
def test_no_process_is_ever_more_than_one_meeting_ahead(number: int) -> None:
    num_meetings = 300
    barrier, counts = Barrier(number), shared_zeros((number,), np.int64)

    def wait(lock: SpinLock) -> None:
        end = time.monotonic() + PATIENCE
        while not lock.acquire(10):
            time.sleep(1e-5)
            assert time.monotonic() < end

    def meet_often(rank: int) -> None:
        barrier.join(rank)
        rng = random.Random(rank)
        for i in range(num_meetings):
            assert counts.min() >= i  # all have come to the last meeting
            assert counts.max() <= i + 1
            counts[rank] = i + 1
            barrier.meet(rng.choice([1, 100]), wait)
            assert counts.min() >= i + 1  # all have come
            assert counts.max() <= i + 2  # those who have left may have come again

    children = []
    for rank in range(1, number):
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # 3.12 warns of forks beside threads
            child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(2 * PATIENCE)
                meet_often(rank)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    try:
        meet_often(0)
    finally:
        ended = [os.waitpid(child, 0)[1] for child in children]
    assert ended == [0] * len(children)
    assert counts.tolist() == [num_meetings] * number
