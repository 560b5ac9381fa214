"""Reproduce the conditions of published figures: lengths, arrivals and costs.

Sources: [a] github.com/WeishuZ/mini-vllm, [b] github.com/shekkari1999/mini-vllm, [c] the write-up
of a C++ engine at kobeyoung.net. They draw with `random.Random`. Its methods call the C library's
logarithm. So the lengths are cut to whole tokens and the arrivals to whole microseconds.
tests/unit/test_book_loads.py has their digests.
"""

import math
import random
from collections.abc import Sequence

from mie.lab.draws import Draws
from mie.lab.loads import from_lengths
from mie.lab.sim.costs import Costs
from mie.lab.workload import Workload

MILLISECOND_PS = 10**9

COSTS = Costs(
    step_ps=65 * MILLISECOND_PS // 10, token_ps=MILLISECOND_PS // 10, logits_ps=MILLISECOND_PS // 4
)
"""[a]'s costs: a step 0.5 ms, its decodes 6.0 ms and 0.35 ms each, a prompt token 0.1 ms.

Here a step without decodes also costs the 6.0 ms. The 0.35 ms are 0.1 for the token and 0.25 for
its logits.
"""


def lognormal_lengths() -> list[int]:
    """Return [a]'s 4,000 lengths around 240."""
    rng = random.Random(0)
    drawn = [int(rng.lognormvariate(math.log(240), 0.6)) for _ in range(4000)]
    return [max(8, min(2048, length)) for length in drawn]


def chat_lengths() -> list[int]:
    """Return [b]'s 200 short and 100 long lengths in random order."""
    rng = random.Random(42)
    lengths = [rng.randint(8, 80) for _ in range(200)]
    lengths += [rng.randint(150, 512) for _ in range(100)]
    rng.shuffle(lengths)
    return lengths


def poisson(num_requests: int, request_rate: float) -> Workload:
    """Return [a]'s prompts of around 256 and answers of around 128 tokens, arriving at random."""
    rng = random.Random(7)
    lengths, moments, now = [], [], 0.0
    for _ in range(num_requests):
        now += rng.expovariate(request_rate)
        moments.append(round(now * 1e6) * 1000)
        lengths.append((_around(rng, 256, 8), _around(rng, 128, 4)))
    return from_lengths(lengths, moments, name=f"poisson {request_rate}")


def _around(rng: random.Random, median: int, least: int) -> int:
    return max(least, min(6 * median, int(rng.lognormvariate(math.log(median), 0.5))))


MIXED_LONG = 0.15
"""Fraction of long requests in `mixed`."""


def mixed_lengths(num_requests: int, seed: int) -> Sequence[tuple[int, int]]:
    """Return lengths of prompts and answers like [c]'s, where one in seven is long.

    The load itself is not published. The published trace shows answers of 32 … 128 tokens, and
    about 15 % of 256 … 512. The published block counts imply prompts of 103 tokens on average. In
    17 requests, prompt and answer together have 720 tokens or more.
    """
    draws = Draws(seed)
    lengths = []
    for _ in range(num_requests):
        is_long = draws.uniform() < MIXED_LONG
        prompt = draws.integer(128, 512) if is_long else draws.integer(8, 128)
        answer = draws.integer(256, 512) if is_long else draws.integer(32, 128)
        lengths.append((prompt, answer))
    return lengths


def mixed(num_requests: int, seed: int) -> Workload:
    """Return `mixed_lengths` as requests that arrive all at once."""
    return from_lengths(mixed_lengths(num_requests, seed), name=f"mixed {seed}")
