"""Answers with many log-probabilities: their memory, their turn, and their price."""

import asyncio
import gc
import itertools
import json
import threading
import tracemalloc

import pytest
from deadlines import PATIENCE
from edge_helpers import JSON_HEADERS, MESSAGES, call_app, client_of, load
from hypothesis import given
from hypothesis import strategies as st

from mie import SamplingParams
from mie.engine.watch.queue import most_logprobs
from mie.sched.orders.fair import cost
from mie.sched.result import TokenLogprobs
from mie.sched.sequence import LOGPROBS_PER_TOKEN, Request
from mie.serve import written as writing
from mie.serve.app import create_app
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys
from mie.serve.limits import QueueLimit
from mie.serve.writer import Writer
from mie.serve.written import PART_BYTES, json_pieces, json_text, written

PROMPT = [5] * 400
LARGE = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 20}
SMALL = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    engine = load(max_num_seqs=4, num_blocks=300)
    yield engine
    engine.shutdown()


async def post(app, path, body, key=None, on_part=lambda size: None):
    """Call an app as a server does, and return the status and the size of the answer.

    The answer is not kept, so that only the server's memory counts.
    """
    status = size = 0
    headers = [*JSON_HEADERS, *([(b"authorization", b"Bearer " + key.encode())] if key else [])]

    async def send(message):
        nonlocal status, size
        status = message.get("status", status)
        body = message.get("body", b"")
        size += len(body)
        if body:
            on_part(len(body))

    await call_app(app, path, json.dumps(body).encode(), send, headers=headers)
    return status, size


def spied(monkeypatch):
    """Return the list of the bytes that answers are counted with."""
    counted, original = [], QueueLimit.hold_answer

    def hold(self, client, num_bytes, planned):
        counted.append(num_bytes)
        return original(self, client, num_bytes, planned)

    monkeypatch.setattr(QueueLimit, "hold_answer", hold)
    return counted


TEXT = {"max_tokens": 40, "ignore_eos": True}
KINDS = {
    "prompt": ("/v1/completions", LARGE),
    "echo": ("/v1/completions", {**LARGE, "prompt_logprobs": None, "echo": True, "logprobs": 20}),
    "both": ("/v1/completions", {**LARGE, "echo": True, "logprobs": 20}),
    "n": ("/v1/completions", {**LARGE, "n": 3}),
    "prompts": ("/v1/completions", {**LARGE, "prompt": [PROMPT[:150], PROMPT[:250]]}),
    "stream": ("/v1/completions", {"prompt": "a", **TEXT, "n": 4, "logprobs": 20, "stream": True}),
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, **TEXT, "n": 4, "logprobs": True, "top_logprobs": 20},
    ),
    "ollama": (
        "/api/generate",
        {"prompt": "a", "logprobs": True, "top_logprobs": 20, "stream": False, "raw": True}
        | {"options": {"num_predict": 150}},
    ),
}


QUICK = ("both", "chat")


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
async def test_an_answer_takes_no_more_memory_than_is_counted(engine, monkeypatch, kind):
    path, body = KINDS[kind]
    counted = spied(monkeypatch)
    app = create_app(engine, ServeConfig())
    async with app.router.lifespan_context(app):
        await post(app, path, {**body, "prompt": "a"} if "prompt" in body else body)
        del counted[:]  # caches are filled
        gc.collect()
        tracemalloc.start()
        try:
            status, size = await post(app, path, body)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        limit = app.state.edge.queue_limit
    assert status == 200
    [num_bytes] = counted
    assert peak < num_bytes + 800_000, (kind, peak, num_bytes, size)
    assert size < num_bytes
    assert not limit.answer_bytes


async def test_another_request_has_its_turn_while_a_large_answer_is_written(engine, monkeypatch):
    """The large answer stops at its first piece until the other request has been answered."""
    may_write, is_writing, threads = threading.Event(), threading.Event(), set()
    original = writing.json_pieces

    def pieces(value):
        threads.add(threading.get_ident())
        is_writing.set()
        assert may_write.wait(PATIENCE)
        yield from original(value)

    monkeypatch.setattr(writing, "json_pieces", pieces)
    app = create_app(engine, ServeConfig())
    async with app.router.lifespan_context(app):
        large = [asyncio.ensure_future(post(app, "/v1/completions", LARGE)) for _ in range(3)]
        try:
            assert await asyncio.to_thread(is_writing.wait, PATIENCE)
            for _ in range(8):  # more than the event loop has threads
                status, _ = await post(app, "/v1/completions", SMALL)
                assert status == 200
            assert not any(each.done() for each in large)
        finally:
            may_write.set()
        assert {status for status, _ in await asyncio.gather(*large)} == {200}
    assert threading.get_ident() not in threads


async def test_other_tasks_run_between_two_parts(engine):
    turns, at_parts, sizes = 0, [], []

    def on_part(size):
        at_parts.append(turns)
        sizes.append(size)

    app = create_app(engine, ServeConfig())
    async with app.router.lifespan_context(app):
        asking = asyncio.ensure_future(post(app, "/v1/completions", LARGE, on_part=on_part))
        while not asking.done():
            turns += 1
            await asyncio.sleep(0)
        _, size = asking.result()
    assert size > 5 * PART_BYTES
    assert max(sizes) < 2 * PART_BYTES
    assert all(a < b for a, b in itertools.pairwise(at_parts))


async def test_a_large_answer_says_what_a_small_one_says(engine, monkeypatch):
    async with client_of(engine) as client:
        large = (await client.post("/v1/completions", json=LARGE)).json()
        monkeypatch.setattr("mie.serve.writer.PART_BYTES", 1 << 40)
        answer = await client.post("/v1/completions", json=LARGE)
        small = answer.json()
    for name in ("choices", "usage", "object", "model"):
        assert large[name] == small[name]
    rows = small["choices"][0]["prompt_logprobs"]
    assert len(rows) == len(PROMPT)
    assert rows[0] is None
    assert all(len(row) in (20, 21) for row in rows[1:])


async def test_a_key_may_take_half_of_the_memory_and_leaves_the_rest(engine, monkeypatch):
    may_write = asyncio.Event()
    original = Writer.parts_of
    config = ServeConfig(keys=Keys.of(["a-key-of-one", "b-key-of-two"]))
    counted = spied(monkeypatch)
    app = create_app(engine, config)
    async with app.router.lifespan_context(app):
        await post(app, "/v1/completions", LARGE, "a-key-of-one")
        [num_bytes] = counted
    assert num_bytes > 500_000
    loop = asyncio.get_running_loop()

    async def allowed():
        await may_write.wait()

    def held(self, choices):
        asyncio.run_coroutine_threadsafe(allowed(), loop).result(PATIENCE)
        return original(self, choices)

    monkeypatch.setattr(Writer, "parts_of", held)
    config = ServeConfig(keys=config.keys, max_answer_bytes=2 * num_bytes + 2)
    app = create_app(engine, config)
    async with app.router.lifespan_context(app):
        limit = app.state.edge.queue_limit

        async def ask(key, body):
            return (await post(app, "/v1/completions", body, f"{key}-key-of-{NAMES[key]}"))[0]

        first = asyncio.ensure_future(ask("a", LARGE))
        while not limit.answer_bytes:
            await asyncio.sleep(0)
        assert await ask("a", {**SMALL, "logprobs": 1}) == 429
        assert await ask("a", SMALL) == 200
        assert await ask("b", {**SMALL, "logprobs": 1}) == 200
        second = asyncio.ensure_future(ask("b", LARGE))
        while len(limit.answer_bytes) < 2:
            await asyncio.sleep(0)
        assert await ask("b", {**SMALL, "logprobs": 1}) == 429
        may_write.set()
        assert await asyncio.gather(first, second) == [200, 200]
        assert not limit.answer_bytes
        assert await ask("a", LARGE) == 200
        assert await ask("a", {**LARGE, "n": 2}) == 400
        assert not limit.answer_bytes


NAMES = {"a": "one", "b": "two"}


async def test_the_message_names_the_limit(engine):
    async with client_of(engine, ServeConfig(max_answer_bytes=1000)) as client:
        answer = await client.post("/v1/completions", json=LARGE)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "the limit is 1000" in message
        assert "--max-answer-bytes" in message
        assert (await client.post("/v1/completions", json=SMALL)).status_code == 200


async def test_an_answer_that_nobody_waits_for_is_given_up(engine, monkeypatch):
    """The client leaves while its answer is written."""
    is_writing, may_write, given_up = threading.Event(), threading.Event(), threading.Event()
    original = Writer.parts_of

    def held(self, choices):
        is_writing.set()
        assert may_write.wait(PATIENCE)
        if not original(self, choices):
            given_up.set()

    monkeypatch.setattr(Writer, "parts_of", held)
    app = create_app(engine, ServeConfig())
    async with app.router.lifespan_context(app):
        asking = asyncio.ensure_future(post(app, "/v1/completions", LARGE))
        assert await asyncio.to_thread(is_writing.wait, PATIENCE)
        asking.cancel()
        await asyncio.wait((asking,))
        assert not app.state.edge.queue_limit.answer_bytes
        assert not app.state.serving.running
        may_write.set()
        assert await asyncio.to_thread(given_up.wait, PATIENCE)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=6,
)


def with_iterators(value):
    """Return the value with each list that a dictionary holds as an iterator."""
    if isinstance(value, dict):
        return {
            key: iter(each) if isinstance(each, list) else with_iterators(each)
            for key, each in value.items()
        }
    return value


@given(VALUES)
def test_pieces_are_the_json_of_the_value(value):
    expected = json.dumps(value, ensure_ascii=False)
    assert "".join(json_pieces(value)) == expected
    assert "".join(json_pieces(with_iterators(value))) == expected
    assert json_text(with_iterators(value)) == expected
    parts = written(with_iterators(value), lambda: True)
    assert b"".join(parts) == expected.encode("utf-8", "surrogatepass")


def rows(count, width):
    return [TokenLogprobs(token_ids=[*range(width)], logprobs=[-1.0] * width, rank=1)] * count


def test_log_probabilities_count_in_a_clients_fair_share():
    def served(**params):
        request = Request("", [1] * 100, SamplingParams(max_tokens=10, **params), number=1)
        request.sequences[0].token_ids.append(1)  # it was served
        return request

    plain, scored = served(), served(prompt_logprobs=20)
    scored.prompt_logprobs = rows(99, 21)
    assert cost(scored) - cost(plain) == 99 * 21 // LOGPROBS_PER_TOKEN
    chosen = served(logprobs=5)
    chosen.sequences[0].logprobs = rows(8, 6)
    assert cost(chosen) - cost(plain) == 48 // LOGPROBS_PER_TOKEN


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, 0),
        ({"logprobs": 0}, 10),
        ({"logprobs": 4, "n": 3}, 150),
        ({"prompt_logprobs": 20}, 100 * 21),
        ({"prompt_logprobs": -1}, 100 * 1001),
        ({"prompt_logprobs": 1, "logprobs": 1, "max_tokens": 1000}, 200 + 2 * 100),
        ({"logprobs": 1, "max_tokens": None}, 2 * 100),
    ],
)
def test_the_most_log_probabilities_of_a_request_are_known_before_it_runs(params, expected):
    params = SamplingParams(**{"max_tokens": 10, **params})
    assert most_logprobs(params, 100, vocab_size=1000, max_model_len=200) == expected
