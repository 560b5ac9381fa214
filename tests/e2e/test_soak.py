"""Serve thousands of requests through a small pool, with the real engine and a scripted model."""

import random
from collections import Counter
from itertools import islice

import pytest
from audit import check_memory, check_scheduler
from scripted_runner import VOCAB_SIZE, expected_tokens, salt_seed, scripted_engine

from mie import EngineConfig, SamplingParams

SALTS = (None, None, None, "tenant a", "tenant b")
BLOCK_SIZE = 4
MAX_MODEL_LEN = 120


def random_requests(rng, count, max_tokens):
    """Yield (prompt, params, labels) of requests. Many begin like another one."""
    documents = [[rng.randrange(4, VOCAB_SIZE) for _ in range(40)] for _ in range(8)]
    for _ in range(count):
        shared = rng.choice(documents)[: rng.choice((0, 4, 13, 22, 40))]
        prompt = shared + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        salt = rng.choice(SALTS)
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 1, 2, 3)),
            max_tokens=rng.choice(max_tokens),
            seed=salt_seed(salt),
            ignore_eos=rng.random() < 0.7,
        )
        yield prompt, params, {"cache_salt": salt, "priority": rng.randint(0, 3)}


def soak(config, *, num_requests, max_tokens, num_blocks, num_host_blocks):
    """Serve all requests, at most 40 at a time, and return the engine and its counts.

    Every token equals the oracle's, and nothing leaks.
    """
    rng = random.Random(0)
    settings = {
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 64,
        "scheduling_policy": "priority",
        **config,
    }
    engine = scripted_engine(EngineConfig(**settings), num_blocks, MAX_MODEL_LEN, num_host_blocks)
    manager, happened = engine.scheduler.manager, Counter()
    limit = min(MAX_MODEL_LEN, num_blocks * BLOCK_SIZE + 1)
    todo, unfinished, expected = random_requests(rng, num_requests, max_tokens), {}, {}
    while True:
        for prompt, params, labels in islice(todo, 40 - len(unfinished)):
            request = engine.add_request(prompt, params, **labels)
            unfinished[request.request_id] = request
            for choice in range(params.n):
                answer = expected_tokens(prompt, params, choice=choice, limit=limit)
                expected[request.request_id, choice] = answer
        if not unfinished:
            break
        step(engine, unfinished, expected, happened)
    assert len(expected) == happened["choices finished"] >= num_requests
    assert not engine.has_work
    assert manager.num_used == 0
    check_scheduler(engine.scheduler)
    check_memory(manager, [])
    return engine, happened


def step(engine, unfinished, expected, happened):
    output = engine.step()
    happened["preemptions"] += output.stats.num_preempted
    happened["blocks swapped out"] += output.stats.num_exported
    happened["blocks swapped in"] += output.stats.num_imported
    assert output.stats.num_blocks_used <= engine.scheduler.manager.num_blocks
    for request_id in output.request_ids:
        if unfinished[request_id].is_finished:
            for seq in unfinished.pop(request_id).sequences:
                assert (seq.output_ids, seq.finish_reason) == expected[request_id, seq.index]
                happened["choices finished"] += 1
    if engine.stats.num_steps % 50 == 0:
        check_scheduler(engine.scheduler)


MODES = {"recompute": ({}, 0), "swap": ({"preemption_mode": "swap"}, 30)}


@pytest.mark.parametrize("num_requests", [400, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_requests_through_96_blocks(mode, num_requests):
    config, num_host_blocks = MODES[mode]
    engine, happened = soak(
        {**config, "max_cached_blocks": 48},
        num_requests=num_requests,
        max_tokens=(1, 5, 10, 20, 40),
        num_blocks=96,
        num_host_blocks=num_host_blocks,
    )
    assert happened["preemptions"] > num_requests // 6, happened
    assert engine.stats.memory.num_hit_tokens > 5 * num_requests // 3
    assert engine.stats.memory.num_partial_hit_tokens > num_requests // 10
    assert (happened["blocks swapped in"] > num_requests // 2) == (mode == "swap"), happened


@pytest.mark.parametrize("mode", ["swap", pytest.param("recompute", marks=pytest.mark.slow)])
def test_400_requests_through_40_blocks_that_never_suffice(mode):
    """Long answers without a watermark make the sequences preempt one another."""
    config, num_host_blocks = MODES[mode]
    _, happened = soak(
        {**config, "watermark": 0.0, "enable_prefix_caching": False},
        num_requests=400,
        max_tokens=(30, 40, 60),
        num_blocks=40,
        num_host_blocks=num_host_blocks,
    )
    assert happened["preemptions"] > 400, happened
    assert (happened["blocks swapped in"] > 2000) == (mode == "swap"), happened
