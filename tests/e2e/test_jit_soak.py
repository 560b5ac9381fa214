"""Disturb the `jit` backend: aborts, interrupts, and threads that stop at any moment.

Each request gets the tokens that it gets alone, nothing hangs, and nothing leaks.
"""

import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import python
from deadlines import PATIENCE, join

from mie import LLM, SamplingParams

pytest.importorskip("numba")

NUM_BLOCKS = 300
PROMPTS = [f"Tell me about {name} and {it}." for name in ("Mia", "Tom") for it in ("a mill", "tea")]
PROMPTS += [f"Once upon a time, {name} " * 12 for name in ("Nora", "Hugo")]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=7, ignore_eos=True),
]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Load a model for more threads than there may be CPUs."""
    return LLM("bundled", backend="jit", num_threads=3, num_blocks=NUM_BLOCKS, max_num_seqs=24)


Alone = dict[tuple[int, int], list[int]]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> Alone:
    """Return the tokens of each prompt with each of the params."""
    return {
        (prompt, params): tokens(llm, PROMPTS[prompt], PARAMS[params])
        for prompt in range(len(PROMPTS))
        for params in range(len(PARAMS))
    }


def tokens(llm: LLM, prompt: str, params: SamplingParams) -> list[int]:
    return list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)


def check_nothing_is_left(llm: LLM) -> None:
    assert not llm.has_work
    llm.reset_prefix_cache()
    assert llm.engine.scheduler.manager.num_available == NUM_BLOCKS


def resident_kib() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


def serve(llm: LLM, alone: Alone, rng: random.Random, count: int) -> Counter[str]:
    """Serve requests, of which 30 % are aborted at random steps, and check the others' tokens."""
    happened: Counter[str] = Counter()
    unfinished: dict[str, tuple[int, int]] = {}
    while happened["added"] < count or unfinished:
        while happened["added"] < count and len(unfinished) < 40:
            which = rng.choice(list(alone))
            happened["added"] += 1
            request_id = f"{happened['added']}"
            llm.add_request(PROMPTS[which[0]], PARAMS[which[1]], request_id)
            unfinished[request_id] = which
        for output in llm.step():
            if output.finished and output.request_id in unfinished:
                which = unfinished.pop(output.request_id)
                assert list(output.outputs[0].token_ids) == alone[which]
                happened["finished"] += 1
        while unfinished and happened["aborted"] < 0.3 * happened["added"]:
            request_id = rng.choice(list(unfinished))
            llm.abort(request_id)
            del unfinished[request_id]
            happened["aborted"] += 1
    while llm.has_work:
        llm.step()
    return happened


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=SLOW)])
def test_many_requests_with_a_third_aborted(llm: LLM, alone: Alone, count: int) -> None:
    rng = random.Random(count)
    serve(llm, alone, rng, count // 5)
    warm = resident_kib()
    happened = serve(llm, alone, rng, count)
    assert happened["finished"] + happened["aborted"] == count
    assert happened["aborted"] >= 0.3 * count
    check_nothing_is_left(llm)
    grown = resident_kib() - warm
    print(f"{count} requests: {happened}, {warm} KiB before, {grown} KiB more")
    assert grown < 16 * 1024, "anonymous memory grew"


class Interrupter:
    """Sends this process SIGINT from a thread, at a random moment of each block."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._go, self._sent = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while self._go.acquire() and not self._is_over:
            time.sleep(self._rng.random() * 0.012)
            os.kill(os.getpid(), signal.SIGINT)
            self._sent.release()

    def strike(self, action: Any) -> bool:
        """Call the action, and return whether the interrupt cut it."""
        try:
            try:
                self._go.release()
                action()
            except KeyboardInterrupt:
                self._sent.acquire()
                return True
            self._sent.acquire()
            for _ in range(1000):  # the signal may be handled only now
                time.sleep(0.001)
        except KeyboardInterrupt:
            return False
        raise AssertionError("no interrupt came")

    def close(self) -> None:
        self._is_over = True
        self._go.release()
        join(self._thread)


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=SLOW)])
def test_interrupts_at_random_moments(llm: LLM, alone: Alone, count: int) -> None:
    rng = random.Random(count)
    interrupter = Interrupter(rng)
    cut = sent = 0
    try:
        while cut < count:
            batch = rng.sample(PROMPTS, rng.randint(1, 4))
            cut += interrupter.strike(
                lambda batch=batch: llm.generate(batch, PARAMS[0], use_tqdm=False)
            )
            sent += 1
            if sent % 5 == 0:
                which = rng.choice(list(alone))
                assert tokens(llm, PROMPTS[which[0]], PARAMS[which[1]]) == alone[which]
    finally:
        interrupter.close()
    print(f"{sent} interrupts, {cut} of them cut a call")
    while llm.has_work:
        llm.step()
    check_nothing_is_left(llm)
    for (prompt, params), wanted in alone.items():
        assert tokens(llm, PROMPTS[prompt], PARAMS[params]) == wanted


PROGRAM = """
    import json, sys, threading
    from mie import LLM, SamplingParams

    llm = LLM("bundled", backend="jit", num_threads=3, num_blocks=200)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = json.loads(sys.argv[1])

    def answer():
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    answers = answer()
    workers = [each for each in threading.enumerate() if each.name.startswith("mie-jit-")]
    print(json.dumps([answers, [each.native_id for each in workers]]), flush=True)
    for line in sys.stdin:
        assert all(answer() == answers for _ in range(int(line)))
        print("done", flush=True)
"""


@contextmanager
def program(alone: Alone) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a process that generates when it is told how often, and return it and its workers."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps(PROMPTS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        try:
            answers, workers = json.loads(line_of(process))
            assert answers == [alone[prompt, 0] for prompt in range(len(PROMPTS))]
            assert len(workers) == 2
            yield process, workers
            process.stdin.close()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], times: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{times}\n")
    process.stdin.flush()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process has ended"
    return line


class Tracer:
    """Stops single threads of another process, between any two instructions of theirs."""

    SEIZE, INTERRUPT, CONTINUE, DETACH = 0x4206, 0x4207, 7, 17
    WALL = 0x40000000

    def __init__(self, threads: list[int]) -> None:
        self._threads = threads
        for thread in threads:
            if self._call(self.SEIZE, thread):
                pytest.skip("this system does not let a process trace its child")

    def _call(self, request: int, thread: int) -> int:
        call = ctypes.CDLL(None, use_errno=True).ptrace
        call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        result: int = call(request, thread, None, None)
        return result

    def stop(self, thread: int) -> None:
        assert self._call(self.INTERRUPT, thread) == 0
        os.waitpid(thread, self.WALL)

    def go_on(self, thread: int) -> None:
        assert self._call(self.CONTINUE, thread) == 0

    def close(self) -> None:
        for thread in self._threads:
            with suppress(OSError, AssertionError):
                self.stop(thread)
                self._call(self.DETACH, thread)


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="ptrace as Linux has it")


@needs_linux
def test_workers_that_get_no_cpu_hold_up_nobody(alone: Alone) -> None:
    """They stop between two runs. The caller then does all the work."""
    with program(alone) as (process, workers):
        tracer = Tracer(workers)
        for worker in workers:
            tracer.stop(worker)
        ask(process, 2)
        assert line_of(process) == "done\n"
        for worker in workers:
            tracer.go_on(worker)
        ask(process, 1)
        assert line_of(process) == "done\n"
        tracer.close()


@needs_linux
@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=SLOW)])
def test_a_worker_stops_at_random_moments(alone: Alone, count: int) -> None:
    rng = random.Random(count)
    with program(alone) as (process, workers):
        tracer = Tracer(workers)
        for _ in range(count // 10):
            ask(process, 4)
            for _ in range(10):
                worker = rng.choice(workers)
                time.sleep(rng.random() * 0.004)
                tracer.stop(worker)
                time.sleep(rng.random() * 0.004)
                tracer.go_on(worker)
            assert line_of(process) == "done\n"
        tracer.close()


def test_a_program_ends_while_its_workers_spin_or_sleep() -> None:
    """The exit code is 0, although the program keeps the model until its end."""
    text = """
        import sys, time
        import numpy as np
        from mie.ops_jit.jit_backend import JitBackend
        backends = [JitBackend(num_threads=3) for _ in range(3)]
        for backend in backends:
            backend.activate(np.ones((3, 64), np.float32), "silu")
        time.sleep(float(sys.argv[1]))
    """
    for seconds in ("0", "0.0005", "0.05"):
        assert python("-c", textwrap.dedent(text), seconds).stderr == ""
