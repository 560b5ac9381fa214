"""Compare chapters with brute force where possible."""

import random

import pytest

from mie.sim.book import batching, capacity, chunking, prefix, pressure, published
from mie.sim.costs import StepWork, causal_pairs
from mie.sim.devices import costs_on, find_device
from mie.sim.shapes import find_shape


@pytest.mark.parametrize("block_size", [1, 7, 16, 512])
@pytest.mark.parametrize("seed", range(3))
def test_capacity_is_a_sum_of_ceilings(block_size, seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 512) for _ in range(400)]
    num_free, count = capacity.NUM_SLOTS // block_size, 0
    while count < 400 and -(-lengths[count] // block_size) <= num_free:
        num_free -= -(-lengths[count] // block_size)
        count += 1
    found = capacity._fill(lengths, block_size)
    reserved = (capacity.NUM_SLOTS // block_size - num_free) * block_size
    assert found["num_sequences"] == count
    assert found["used"] == sum(lengths[:count]) / reserved
    assert found["wasted"] == 1 - found["used"] or found["wasted"] == pytest.approx(
        1 - found["used"]
    )


def test_capacity_equals_the_published_figures():
    result = capacity.run("full")
    fits = [
        [result[name][kind]["num_sequences"] for kind in ("contiguous", "paged")]
        for name in ("lognormal", "chat")
    ]
    assert fits == [[16, 112], [64, 226]]
    contiguous = [row["contiguous"]["num_sequences"] for row in result["contexts"]]
    assert contiguous == [64, 32, 16, 8, 4]


def test_rounds_equal_those_of_seats_filled_in_turn():
    drain = batching._drain(48, 8, range(3))
    for row in drain["rounds"]:
        answers = [answer for _, answer in published.mixed_lengths(48, row["seed"])]
        batches = [answers[start : start + 8] for start in range(0, 48, 8)]
        assert row["static"] == sum(map(max, batches))
        ends = [0] * 8  # the time at which each seat is free; the next request takes the first one
        for answer in answers:
            ends.sort()
            ends[0] += answer
        assert row["continuous"] == max(ends)


def test_a_shared_prompt_is_computed_once():
    result = prefix.run("small")
    stream = result["stream"]
    own = stream["num_requests"] * 8
    assert stream["off"]["num_prefill_tokens"] == stream["num_requests"] * 512 + own
    assert stream["on"]["num_prefill_tokens"] == 512 + own
    rates = [row["hit_rate"] for row in result["budgets"]]
    assert rates == sorted(rates)
    assert rates[0] == 0 < rates[1]
    found = (result["budgets"][0]["num_prefill_tokens"] - 6 * 8) / 6
    assert found == 512  # without a budget, none of six requests finds anything


def test_every_request_that_fits_the_pool_completes():
    rows = pressure.run("small")["pools"]
    assert all(row["num_completed"] == row["num_servable"] for row in rows)
    assert rows[-1]["num_preemptions"] > 0
    assert rows[-1]["num_cut"] > 0, "the smallest pool is too large to show anything"


def test_an_unchunked_prompt_delays_the_next_token_by_its_cost():
    result = chunking.run("small")
    costs = costs_on(find_device(chunking.DEVICE), find_shape(chunking.MODEL))
    work = StepWork(
        num_tokens=4096,
        num_sampled=1,
        num_pairs=causal_pairs(0, 4096),
        num_context=4096,
        num_seqs=1,
        num_chunks=1,
        num_copied=0,
        num_swapped=0,
    )
    alone = costs.step_ns(work) / 1e6
    assert alone < result["unchunked"]["worst_itl_ms"] < 1.05 * alone
    waits = [row["worst_itl_ms"] for row in result["chunks"]]
    assert waits == sorted(waits)
    assert waits[0] < alone / 10
