"""Kill a rank at random moments: the engine ends with an error, and no process is left."""

import contextlib
import gc
import os
import random
import signal
import threading
import time

import pytest
from compiled import needs_numba
from deadlines import join, within
from emulated import needs_compiler
from engines import run_to_end
from forks import children
from tiny_models import CONFIGS, TinyModel

from mie import SamplingParams
from mie.config.engine import EngineConfig
from mie.errors import WorkerError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

NUM_KILLS = {"jit": 200, "cupy-emulated": 30}
LOADING, STEPS = 1.5, 1.0
"""Seconds in which a rank is killed: of loading, and of steps."""


def kill_one(rng, before, seconds):
    """Kill a rank after so many seconds, once there is one."""
    time.sleep(seconds)
    for _ in range(1000):
        if ranks := sorted(children() - before):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(ranks), signal.SIGKILL)
            return
        time.sleep(0.01)


def engine_of(directory, backend, num_ranks):
    threads = {"num_threads": 1} if backend == "jit" else {}
    config = EngineConfig(num_blocks=64, block_size=4, max_num_seqs=4, **threads)
    settings = LoadSettings(engine=config, backend=backend, tensor_parallel_size=num_ranks)
    return load_engine(directory, settings)


def ask(engine):
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    return [engine.add_request([5, 6, 7], params) for _ in range(3)]


class Life:
    """An engine of two or three ranks, until one of them is killed."""

    def __init__(self, number):
        self.rng, self.before = random.Random(number), children()
        self.is_killed_loading = self.rng.random() < 0.2
        self.requests, self.kept = [], []

    def run(self, directory, backend):
        num_ranks = self.rng.choice([2, 3])
        if self.is_killed_loading:
            self.start_killer(LOADING)
        engine = engine_of(directory, backend, num_ranks)
        if not self.is_killed_loading:
            self.start_killer(STEPS)
        while True:
            self.requests = ask(engine)
            while engine.has_work:
                self.kept = self.tokens
                engine.step()

    @property
    def tokens(self):
        return [list(each.sequences[0].output_ids) for each in self.requests]

    def start_killer(self, most):
        given = self.rng, self.before, self.rng.random() * most
        self.killer = threading.Thread(target=kill_one, args=given)
        self.killer.start()


def live_and_be_killed(directory, number, backend):
    life = Life(number)
    with pytest.raises(WorkerError, match=r"rank \d of \d has ended: signal 9"):
        life.run(directory, backend)
    join(life.killer)
    assert life.tokens == life.kept
    assert children() <= life.before, "no rank is left"


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [pytest.param("jit", marks=needs_numba), pytest.param("cupy-emulated", marks=needs_compiler)],
)
def test_a_rank_that_is_killed_leaves_no_hang_and_no_process(tmp_path, backend):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6}
    model = TinyModel(tmp_path, CONFIGS["llama"] | heads)
    for num_ranks in (2, 3):  # the emulator builds its kernels, in processes that are no ranks
        engine = engine_of(model.directory, backend, num_ranks)
        ask(engine)
        run_to_end(engine)
        del engine
    gc.collect()
    for number in range(NUM_KILLS[backend]):
        failures = []

        def live(number=number, failures=failures):
            try:
                live_and_be_killed(model.directory, number, backend)
            except BaseException as error:
                failures.append(error)

        within(live)
        assert failures == [], number
