"""Promises 1 and 4: equal seeds give equal answers under any load, and the work is seen."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from audit import engine_of
from deadlines import PATIENCE
from live_server import live

from mie import AsyncLLM

STORY = "Once upon a time Mia the fox and Tom the owl lived by the old mill near the lake. "


# Its eight sequences need more than 14 blocks, however slow the clients are.
WIDE = {
    "prompt": STORY,
    "seed": 7,
    "max_tokens": 40,
    "temperature": 1.3,
    "n": 8,
    "logprobs": 2,
    "ignore_eos": True,
}


def bodies() -> list[dict[str, Any]]:
    """Requests of many kinds, each with a seed."""
    draw = random.Random(5)
    return [WIDE] + [
        {
            "prompt": STORY[: draw.randrange(4, len(STORY))] + "They" * draw.randrange(3),
            "seed": draw.randrange(2**40),
            "max_tokens": draw.randrange(4, 40),
            "temperature": draw.choice([0, 0.7, 1.3]),
            "top_p": draw.choice([1, 0.9]),
            "n": draw.choice([1, 1, 2]),
            "logprobs": draw.choice([0, 2]),
            "ignore_eos": True,
            "frequency_penalty": draw.choice([0, 0.5]),
        }
        for _ in range(12)
    ]


def choices_of(answer: httpx2.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """The answers when each request runs alone, without cached prefixes."""
    engine = AsyncLLM("bundled", enable_prefix_caching=False, batch_invariant=True)
    try:
        with live(engine) as url, httpx2.Client(base_url=url, timeout=PATIENCE) as client:
            return [choices_of(client.post("/v1/completions", json=body)) for body in bodies()]
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 400},
        {"num_blocks": 14, "watermark": 0},
        pytest.param(
            {"num_blocks": 14, "watermark": 0, "preemption_mode": "swap", "swap_space": 2**24},
            marks=pytest.mark.slow,
        ),
        pytest.param({"num_blocks": 400, "max_num_batched_tokens": 12}, marks=pytest.mark.slow),
    ],
    ids=["cached", "preempted", "swapped", "chunked"],
)
def test_seeded_requests_get_the_same_answer_under_any_load(alone, settings):
    engine = AsyncLLM("bundled", max_num_seqs=8, batch_invariant=True, **settings)
    try:
        with live(engine) as url, httpx2.Client(base_url=url, timeout=PATIENCE) as client:
            order = list(enumerate(bodies())) * 2
            random.Random(1).shuffle(order)
            # WIDE runs twice before the load: it is preempted, and then finds its prompt.
            order = [(0, WIDE), (0, WIDE), *order]

            def ask(numbered: tuple[int, dict[str, Any]]) -> httpx2.Response:
                return client.post("/v1/completions", json=numbered[1])

            with ThreadPoolExecutor(12) as pool:
                answers = [ask(order[0]), ask(order[1]), *pool.map(ask, order[2:])]
    finally:
        engine.shutdown()
    for (index, _), answer in zip(order, answers, strict=True):
        assert choices_of(answer) == alone[index]
    cached = [a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    preempted = sum(a.json()["metrics"]["num_preemptions"] for a in answers)
    swapped = sum(a.json()["metrics"]["num_swaps"] for a in answers)
    recomputed = sum(a.json()["metrics"]["num_recomputed_tokens"] for a in answers)
    assert cached[1] > 0
    # The responses and the engine count the same, and the case was tried.
    stats = engine_of(engine).stats
    assert preempted == stats.num_preemptions
    if settings["num_blocks"] == 14:
        assert preempted > 0
        assert (swapped > 0) == ("preemption_mode" in settings)
        assert (recomputed > 0) == ("preemption_mode" not in settings)


def test_the_fingerprint_stays_the_same(server):
    names = {
        server.ask(path, max_tokens=1, **body)["system_fingerprint"]
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        )
    }
    assert len(names) == 1


def test_the_fingerprint_tells_weights_apart_that_have_the_same_shape(server):
    names = set()
    own = {"backend": "numpy", "quantization": "int8", "num_blocks": 8, "load_format": "dummy"}
    for settings in (
        *({"seed": 1}, {"seed": 1}, {"seed": 2}),
        *({"batch_invariant": True}, {"activations": "int8"}),
    ):
        engine = AsyncLLM("bundled", **own, **{"seed": 1, **settings})
        try:
            with live(engine) as url:
                body = {"prompt": "a", "max_tokens": 1}
                answer = server.client.post(f"{url}/v1/completions", json=body)
                names.add(answer.json()["system_fingerprint"])
        finally:
            engine.shutdown()
    assert len(names) == 4
