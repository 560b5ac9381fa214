"""Check the threads of the `jit` backend: forks, refused threads, and their end."""

import gc
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from forks import exit_code_of_child

pytest.importorskip("numba")

from mie.errors import ThreadLimitError
from mie.ops_jit import team as team_module
from mie.ops_jit.jit_backend import JitBackend
from mie.ops_jit.kernels.team import LAST_RUN
from mie.ops_jit.layout import DONE, RUN_SHIFT, TICKET

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

X = np.linspace(-4, 4, 40 * 32, dtype=np.float32).reshape(40, 32)
"""Rows of five tiles."""
PATIENCE = 120.0


def workers() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("mie-jit-")}


@pytest.fixture(scope="module")
def backend() -> JitBackend:
    return JitBackend(num_threads=3)


@pytest.fixture(scope="module")
def expected(backend: JitBackend) -> np.ndarray:
    return np.array(backend.activate(X, "silu"))


@pytest.fixture(autouse=True)
def _no_thread_is_left(backend: JitBackend) -> Iterator[None]:
    before = workers()
    yield
    gc.collect()
    for thread in workers() - before:
        thread.join(PATIENCE)
    assert workers() <= before


def check(backend: JitBackend, expected: np.ndarray, times: int = 1) -> None:
    for _ in range(times):
        np.testing.assert_array_equal(backend.activate(X, "silu"), expected)


def test_a_child_does_not_wait_for_the_lock_of_a_thread_that_it_does_not_have(backend, expected):
    with backend.recorder.team._locks[os.getpid()]:
        assert exit_code_of_child(lambda: check(backend, expected, 3)) == 0


def test_a_child_begins_anew_when_it_is_forked_in_the_middle_of_a_run(backend, expected) -> None:
    words = backend.recorder.team._words
    words[DONE] = 1
    try:
        assert exit_code_of_child(lambda: check(backend, expected, 3)) == 0
    finally:
        words[DONE] = 0


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the system start this many threads and no more."""
    real, started = team_module.start_thread, []

    def start(thread: threading.Thread) -> None:
        if len(started) == number:
            raise ThreadLimitError("refused")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(team_module, "start_thread", start)


@pytest.mark.parametrize("number", [0, 1])
def test_the_threads_that_started_end_if_another_is_refused(number, monkeypatch) -> None:
    refuse(monkeypatch, number)
    with pytest.raises(ThreadLimitError):
        JitBackend(num_threads=3)


@pytest.mark.parametrize("number", [0, 1])
def test_a_child_whose_threads_are_refused_says_so_and_goes_on_without_them(
    number: int, backend: JitBackend, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def child() -> None:
        refuse(monkeypatch, number)
        with pytest.raises(ThreadLimitError):
            backend.activate(X, "silu")
        check(backend, expected, 3)

    backend.recorder.team._words[DONE] = 1  # as in the middle of a run
    try:
        assert exit_code_of_child(child) == 0
    finally:
        backend.recorder.team._words[DONE] = 0


@pytest.mark.parametrize("before", [LAST_RUN - 2, LAST_RUN])
def test_the_numbers_of_runs_begin_again(before, backend, expected) -> None:
    words = backend.recorder.team._words
    words[TICKET] = before << RUN_SHIFT
    check(backend, expected, 5)
    assert 0 <= words[TICKET] >> RUN_SHIFT < 6
