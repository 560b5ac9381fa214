"""Check that the processes of ranks compute together, and that none outlives the engine."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from deadlines import run
from emulated import needs_compiler
from forks import assert_ends, children

from mie import LLM, SamplingParams
from mie.errors import EngineDeadError, WorkerError
from mie.load import engine

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SETTINGS = {"num_blocks": 16, "backend": "numpy", "num_threads": 1}
EMULATED = {"num_blocks": 16, "backend": "cupy-emulated"}
PROGRAM = """
import os, sys
from mie import LLM
from mie.load.ranks import Ranks
made, start = [], Ranks.loading
Ranks.loading = lambda ranks, backend: made.append(ranks) or start(ranks, backend)
llm = LLM("bundled", backend="numpy", num_blocks=16, tensor_parallel_size=4)
print(*made[0].pids, flush=True)
{action}
"""


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, pytest.param(EMULATED, marks=[pytest.mark.slow, needs_compiler])],
    ids=lambda settings: settings["backend"],
)
def test_processes_give_the_tokens_of_one_and_end_with_a_killed_rank(settings):
    prompts = ["Once upon a time", "Mia"]
    expected = LLM("bundled", **settings).generate(prompts, PARAMS, use_tqdm=False)
    before = children()
    llm = LLM("bundled", **settings, tensor_parallel_size=2)
    [rank] = children() - before
    given = llm.generate(prompts, PARAMS, use_tqdm=False)
    for one, other in zip(given, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1 of 2 has ended: signal 9"):
        llm.generate(prompts, PARAMS, use_tqdm=False)
    assert children() <= before


@pytest.mark.slow
def test_ranks_end_with_their_engine():
    before = children()
    llm = LLM("bundled", **SETTINGS, tensor_parallel_size=2)
    assert len(children() - before) == 1
    del llm
    gc.collect()
    assert children() <= before


@pytest.mark.slow
@pytest.mark.parametrize("action", ["os.kill(os.getpid(), 9)", "sys.exit()"])
def test_ranks_end_with_their_parent(action):
    done = run([sys.executable, "-c", PROGRAM.format(action=action)])
    pids = [*map(int, done.stdout.split())]
    assert len(pids) == 3, done.stderr
    for pid in pids:
        assert_ends(pid)


@pytest.mark.slow
def test_a_rank_that_cannot_load_says_why(monkeypatch):
    before = children()
    monkeypatch.setattr(engine, "directory_of", lambda directory: Path("/nowhere"))
    with pytest.raises(WorkerError, match=r"rank 1 of 2 has ended: WeightsError: .*/nowhere"):
        LLM("bundled", **SETTINGS, tensor_parallel_size=2)
    assert children() <= before
