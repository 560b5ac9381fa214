"""Check that descriptions are compiled in turn, once, and in a worker that can be killed."""

import os
import random
import signal
import time
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest
import small_tokenizers
from audit import compile_worker
from deadlines import PATIENCE, join
from forks import assert_ends, cpu_seconds_of_children

from mie import StructuredOutputsParams
from mie.errors import RequestError, WorkerError
from mie.structured import compiler
from mie.structured.compiler import Turns
from mie.structured.grammars import Grammars

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

EOS = 1


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(small_tokenizers.byte_level(), 512, [EOS])


def regex(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


def hostile(number: int) -> StructuredOutputsParams:
    """Return a description that takes all of its CPU time."""
    patterns = {f"^[a-z]*{i}[a-z]*$": {} for i in range(number, number + 500)}
    return StructuredOutputsParams(json={"patternProperties": patterns})


def worker_pid(grammars: Grammars) -> int:
    worker = compile_worker(grammars)
    assert worker is not None
    return worker.pid


def compiled_seconds(grammars: Grammars) -> float:
    """Return the CPU time of everything that the worker has compiled."""
    return cpu_seconds_of_children(worker_pid(grammars))


def begun(grammars: Grammars) -> None:
    """Wait until a child of the worker compiles."""
    children = Path(f"/proc/{worker_pid(grammars)}/task/{worker_pid(grammars)}/children")
    for _ in range(6000):
        if children.read_text().split():
            return
        time.sleep(0.01)
    raise AssertionError("nothing is compiled")


# The turns.


def order_of(*jobs: tuple[str, str]) -> list[str]:
    turns = Turns()
    for key, caller in jobs:
        turns.join(regex(key), caller, Future())
    order = []
    while (job := turns.begin()) is not None:
        order.append(str(job.key.regex))
        turns.end(job)
    return order


def test_callers_take_turns():
    many = [(f"a{i}", "A") for i in range(4)]
    assert order_of(*many, ("b0", "B"), ("c0", "C"), ("b1", "B")) == [
        *("a0", "b0", "c0", "a1", "b1", "a2", "a3")
    ]


# The worker.


def test_equal_descriptions_are_compiled_once(grammars: Grammars):
    grammars.start(regex("x"))
    before = compiled_seconds(grammars)
    waiting = [grammars.submit(hostile(0), caller) for caller in "ABCDEFGH"]
    for future in waiting:
        with pytest.raises(RequestError, match="takes more than 1 s of CPU time to compile"):
            future.result()
    with pytest.raises(RequestError, match="takes more than 1 s of CPU time to compile"):
        grammars.submit(hostile(0))
    assert compiled_seconds(grammars) - before < 2


def test_a_salt_reveals_nothing_about_the_descriptions_of_another(grammars: Grammars):
    num_compiled = 0
    compiler = grammars._compiler
    work = compiler._work

    def counted(*args):
        nonlocal num_compiled
        num_compiled += 1
        return work(*args)

    compiler._work = counted
    for salt in ("one", "one", "two", None, "two", None):
        grammars.submit(regex("x"), "A", salt).result()
    assert num_compiled == 3
    for salt in ("one", "two"):
        with pytest.raises(RequestError):
            grammars.submit(regex("("), "A", salt).result()
        with pytest.raises(RequestError):
            grammars.submit(regex("("), "A", salt)  # it is remembered
    assert num_compiled == 5


def test_equal_descriptions_of_several_salts_are_one_while_a_request_holds_it(grammars: Grammars):
    first = grammars.submit(regex("x"), "A", "one").result()
    held = grammars.start(regex("x"))
    for salt in ("two", "three"):
        grammars.submit(regex("x"), "A", salt).result()
        assert grammars.submit(regex("x"), "A", salt).result() is first
    assert held.mask()


def test_a_description_whose_callers_left_is_stopped_and_others_are_never_begun(grammars: Grammars):
    grammars.start(regex("x"))
    waiting = [grammars.submit(hostile(i)) for i in range(40)]
    begun(grammars)
    for future in waiting:
        assert future.cancel()
    assert grammars.start(regex("y")).mask()
    assert compiled_seconds(grammars) < 5  # they would take 40 s
    with pytest.raises(CancelledError):
        waiting[0].result()


def test_another_callers_description_waits_for_one_at_most(grammars: Grammars):
    grammars.start(regex("x"))
    done: list[str] = []
    waiting = [grammars.submit(hostile(i), "A") for i in range(4)]
    begun(grammars)
    innocent = grammars.submit(regex("y"), "B")
    for future in waiting:
        if not future.done():  # a busy machine may have ended the first one before
            future.add_done_callback(lambda _: done.append("A"))
    innocent.add_done_callback(lambda _: done.append("B"))
    innocent.result()
    for future in waiting:
        future.cancel()
    assert done.index("B") <= 1


def test_a_worker_that_hangs_is_replaced(grammars: Grammars, monkeypatch: pytest.MonkeyPatch):
    grammars.start(regex("x"))
    first = worker_pid(grammars)
    os.kill(first, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "WALL_SECONDS", 0.2)
        with pytest.raises(WorkerError, match="the worker process did not answer in time"):
            grammars.start(regex("y"))
    assert_ends(first)
    assert grammars.start(regex("y")).mask()


def test_grammars_that_are_dropped_end_their_worker(grammars: Grammars):
    own = Grammars(small_tokenizers.byte_level(), 512, [EOS])
    own.start(regex("x"))
    pid = worker_pid(own)
    thread = own._compiler._thread
    if thread is not None:
        join(thread)
    del own, thread
    assert_ends(pid)


@pytest.mark.parametrize(
    "leaves", ["while it waits", pytest.param("while it is compiled", marks=pytest.mark.slow)]
)
def test_a_caller_who_leaves_ends_nothing_that_another_waits_for(grammars: Grammars, leaves: str):
    grammars.start(regex("x"))
    shared = hostile(7) if leaves == "while it is compiled" else regex("shared")
    first = grammars.submit(hostile(0), "A")
    if leaves == "while it waits":
        begun(grammars)
    else:
        first.cancel()
    waiting = [grammars.submit(shared, caller) for caller in "ABC"]
    if leaves == "while it is compiled":
        begun(grammars)
    for future in waiting[:2]:
        assert future.cancel()
    first.cancel()
    if leaves == "while it waits":
        assert waiting[2].result(timeout=PATIENCE) is not None
    else:
        with pytest.raises(RequestError, match="takes more than 1 s of CPU time to compile"):
            waiting[2].result(timeout=PATIENCE)


def test_every_job_that_is_waited_for_has_one_turn():
    """Callers join and leave at random; a plain model says which jobs are still wanted."""
    rng = random.Random(3)
    for _ in range(300):
        turns, waiting = Turns(), {}
        running = None
        for _ in range(rng.randint(1, 40)):
            action = rng.choice(["join", "join", "leave", "turn"])
            if action == "join":
                key, future = rng.choice("abcd"), Future()
                waiting[future] = (key, turns.join(regex(key), rng.choice("ABC"), future))
            elif action == "leave" and waiting:
                future = rng.choice([*waiting])
                _, job = waiting.pop(future)
                turns.leave(job, future)
            elif action == "turn":
                if running is not None:
                    turns.end(running)
                    waiting = {f: each for f, each in waiting.items() if each[1] is not running}
                running = turns.begin()
                assert (running is not None) == bool(waiting)
                assert running is None or running.futures <= waiting.keys()
        if running is not None:
            turns.end(running)
            waiting = {f: each for f, each in waiting.items() if each[1] is not running}
        served = []
        while (job := turns.begin()) is not None:
            served += job.futures
            turns.end(job)
        assert len(served) == len({*served})
        assert {*served} == waiting.keys()
