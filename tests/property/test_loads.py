"""Check properties of whole loads: preemption does not feed on itself, and no request starves."""

import random

import pytest
from scripted_runner import scripted_engine

from mie import EngineConfig, SamplingParams

NUM_BLOCKS, MAX_MODEL_LEN = 40, 160
LOADS = range(4)


def num_preemptions(seed, **config):
    """Serve an oversubscribed load to its end, and return the number of preemptions."""
    rng = random.Random(seed)
    settings = {"block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64, **config}
    engine = scripted_engine(EngineConfig(**settings), NUM_BLOCKS, MAX_MODEL_LEN)
    arrivals = sorted(rng.randrange(300) for _ in range(60))
    requests = [
        ([rng.randrange(4, 50) for _ in range(rng.randint(1, 40))], rng.randint(10, 60))
        for _ in arrivals
    ]
    for step in range(10_000):
        while arrivals and arrivals[0] <= step:
            del arrivals[0]
            prompt, max_tokens = requests.pop()
            engine.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        if engine.has_work:
            engine.step()
        elif not arrivals:
            return engine.stats.num_preemptions
    raise AssertionError("the load never ends")


@pytest.mark.parametrize("watermark", [0.01, 0.05])
def test_both_guards_against_thrashing_cost_no_preemptions(watermark):
    """The guards are blocks left free at admission, and no admission in a step that preempted."""
    guarded = [num_preemptions(seed, watermark=watermark) for seed in LOADS]
    bare = [num_preemptions(seed, watermark=0.0, admit_after_preemption=True) for seed in LOADS]
    assert min(bare) > 0, "the loads are too light to show anything"
    assert sum(guarded) <= sum(bare), (guarded, bare)


LONG, SHORT = ([9] * 100, SamplingParams(max_tokens=50)), ([9], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("ageing", [1, 3, 10, 200])
def test_a_long_job_waits_at_most_until_it_has_aged(ageing):
    """There is one seat, and a short job always competes for it.

    The wait is proportional to 1 / ageing. Without ageing it would never end.
    """
    config = EngineConfig(
        scheduling_policy="sjf", sjf_ageing=ageing, max_num_seqs=1, max_forced_run=0
    )
    engine = scripted_engine(config, NUM_BLOCKS, MAX_MODEL_LEN)
    engine.add_request(*SHORT)
    engine.step()
    engine.add_request(*LONG, "long")
    num_steps = 0
    while not any(seq.request.request_id == "long" for seq in engine.scheduler.running):
        if num_steps % 2 == 0:
            engine.add_request(*SHORT)
        engine.step()
        num_steps += 1
        assert num_steps < 1000, "it starves"
    until_oldest = (150 - 3) / ageing
    assert until_oldest <= num_steps <= until_oldest + 4
