"""Requests that are too large, or too many at once, are refused."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from audit import engine_of, queue_of
from edge_helpers import client_of, load, server_of, without_steps

from mie.serve.config import ServeConfig
from mie.serve.keys import Keys


@pytest.fixture(scope="module")
def engine():
    with_engine = load(max_num_seqs=1)
    yield with_engine
    with_engine.shutdown()


def completion(prompt="Once", max_tokens=1, **more):
    return {"prompt": prompt, "max_tokens": max_tokens, **more}


async def test_a_large_body_is_refused_by_its_length(engine):
    async with client_of(engine, ServeConfig(max_request_bytes=200)) as client:
        assert (await client.post("/v1/completions", json=completion())).status_code == 200
        response = await client.post("/v1/completions", json=completion("x" * 200))
        assert response.status_code == 413
        assert response.headers["connection"] == "close"
        error = response.json()["error"]
        assert error["code"] == "request_too_large"
        assert "the limit is 200 bytes" in error["message"]


async def test_a_body_without_a_length_is_read_up_to_the_limit_only(engine):
    num_read = 0

    async def pieces():
        nonlocal num_read
        for _ in range(1000):
            num_read += 100
            yield b"x" * 100

    async with client_of(engine, ServeConfig(max_request_bytes=1000)) as client:
        response = await client.post(
            "/v1/completions", content=pieces(), headers={"content-type": "application/json"}
        )
        assert response.status_code == 413
    assert num_read <= 1200


@pytest.mark.parametrize(
    ("options", "length", "status"),
    [
        ({"max_request_bytes": 10}, {"content-length": "300"}, 413),
        ({"keys": Keys.of(["sk"])}, {}, 401),
    ],
    ids=["too long", "without a key"],
)
async def test_a_refused_body_is_never_read(engine, options, length, status):
    async def pieces():
        raise AssertionError("it was read")
        yield b""

    headers = {"content-type": "application/json", **length}
    async with client_of(engine, ServeConfig(**options)) as client:
        answer = await client.post("/v1/completions", content=pieces(), headers=headers)
        assert answer.status_code == status


@asynccontextmanager
async def filled(running, count):
    """Occupy the only seat, and let ``count`` requests wait until the context ends.

    The seat is free again before the engine computes a step.
    """
    with without_steps(running.edge.engine):
        events = await running.stream(max_tokens=400)
        await anext(events)
        waiting = [
            asyncio.ensure_future(running.client.post("/v1/completions", json=completion("Wait")))
            for _ in range(count)
        ]
        while running.edge.engine.pulse.num_waiting < count:
            await asyncio.sleep(0.01)
        yield waiting
        await events.aclose()
        while running.edge.engine.pulse.num_running:
            await asyncio.sleep(0.01)


async def test_a_full_queue_is_a_429_that_says_when_to_come_back():
    async with server_of(engine_of_its_own(), max_num_queued_reqs=2) as running:
        async with filled(running, 2) as waiting:
            for body in (completion(), completion(stream=True), completion(["a", "b", "c"])):
                response = await running.client.post("/v1/completions", json=body)
                assert response.status_code == 429
                assert 1 <= int(response.headers["retry-after"]) <= 60
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
                assert "--max-num-queued-reqs is 2" in error["message"]
            text = (await running.client.get("/metrics")).text
        found = {"max_num_queued_reqs": 3.0, "max_num_queued_tokens": 0.0}
        found["max_answer_bytes"] = 0.0
        assert rejections(text) == found
        assert [r.status_code for r in await asyncio.gather(*waiting)] == [200, 200]


def engine_of_its_own():
    """A server shuts its engine down."""
    return load(max_num_seqs=1)


def rejections(text):
    lines = [line for line in text.splitlines() if line.startswith("vllm:admission_rejections_")]
    assert all("engine=" not in line for line in lines), "as in vLLM"
    return {line.split('reason="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


async def test_a_burst_does_not_slip_through_between_counting_and_adding():
    async with server_of(engine_of_its_own(), max_num_queued_reqs=5) as running:
        async with filled(running, 0):
            answers = [
                asyncio.ensure_future(running.client.post("/v1/completions", json=completion()))
                for _ in range(40)
            ]
            num_refused = 0
            while num_refused < 35:
                await asyncio.sleep(0.01)
                done = [each.result().status_code for each in answers if each.done()]
                num_refused = done.count(429)
                assert running.edge.engine.pulse.num_waiting <= 5
        statuses = [(await each).status_code for each in answers]
        assert statuses.count(200) == 5
        assert statuses.count(429) == 35


async def test_a_key_that_floods_the_queue_does_not_keep_others_out():
    engine = engine_of_its_own()
    admitted = admissions(engine)
    options = {"max_num_queued_reqs": 3, "keys": Keys.of(["sk-flood", "sk-other"])}
    async with server_of(engine, **options) as running:
        running.client.headers["authorization"] = "Bearer sk-flood"
        async with filled(running, 3) as waiting:
            response = await running.client.post("/v1/completions", json=completion())
            assert response.status_code == 429
            headers = {"authorization": "Bearer sk-other"}
            other = asyncio.ensure_future(
                running.client.post("/v1/completions", json=completion(), headers=headers)
            )
            while engine.pulse.num_waiting < 4:
                await asyncio.sleep(0.01)
        answers = await asyncio.gather(other, *waiting)
        assert [answer.status_code for answer in answers] == [200] * 4
    assert sorted(admitted) == ["key-1"] * 4 + ["key-2"]
    assert admitted.index("key-2") <= 2, "at a tie, one request of the flood goes first"


def admissions(engine):
    """The keys of the requests that left the queue, in order."""
    queue, admitted = queue_of(engine_of(engine).scheduler), []
    original = queue.remove

    def remove(seq):
        was_waiting = original(seq)
        admitted.extend([seq.request.client] * was_waiting)
        return was_waiting

    queue.remove = remove
    return admitted


async def test_tokens_that_wait_are_limited_too():
    async with server_of(engine_of_its_own(), max_num_queued_tokens=20) as running:
        async with filled(running, 1) as waiting:
            response = await running.client.post("/v1/completions", json=completion([[5] * 30]))
            assert response.status_code == 429
            assert "--max-num-queued-tokens is 20" in response.json()["error"]["message"]
        await asyncio.gather(*waiting)
        # Nothing waits now, so it need not wait either.
        response = await running.client.post("/v1/completions", json=completion([[5] * 30]))
        assert response.status_code == 200


async def test_requests_that_find_a_seat_do_not_count_as_waiting(engine):
    async with client_of(engine, ServeConfig(max_num_queued_reqs=0)) as client:
        assert (await client.post("/v1/completions", json=completion())).status_code == 200


async def test_more_prompts_than_could_ever_be_queued_are_a_bad_request(engine):
    async with client_of(engine, ServeConfig(max_num_queued_reqs=2)) as client:
        body = completion(["a"] * 4)
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"


async def test_the_queue_is_limited_by_default(engine):
    async with client_of(engine) as client:
        response = await client.post("/v1/completions", json=completion(["a"] * 6))
        assert "takes 4 that wait and 1 that run" in response.json()["error"]["message"]


async def test_a_client_cannot_raise_its_priority():
    engine = load(scheduling_policy="priority")
    priorities, original = [], engine_of(engine).add

    def add(*args, priority, **labels):
        priorities.append(priority)
        return original(*args, priority=priority, **labels)

    engine_of(engine).add = add
    for asked, highest in ((-5, 0), (7, 0), (-5, -3), (None, 4)):
        async with client_of(engine, ServeConfig(highest_priority=highest)) as client:
            response = await client.post("/v1/completions", json=completion(priority=asked))
            assert response.status_code == 200
    engine.shutdown()
    assert priorities == [0, 7, -3, 4]
