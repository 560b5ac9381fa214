"""The front of replicas, with replicas of this process."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from audit import loop_of
from edge_helpers import DIALECTS, held
from stepped import Stepped, eventually

from mie import AsyncLLM
from mie.frontend.routing import PrefixRouter
from mie.ray.front import Call, ReplicaAnswer, combining, front_app, piped
from mie.serve.app import create_app
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys

JSON = {"content-type": "application/json"}
BODY = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 1, "temperature": 0.8}


class Batches:
    """An answer whose replica may be lost on the way."""

    def __init__(self, batches: AsyncGenerator[Any, None], lost_after: int) -> None:
        self._batches = batches
        self._left = lost_after
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the actor died")
        return await self._batches.__anext__()

    def cancel(self) -> None:
        self.is_cancelled = True


class Local:
    """Replicas that are applications of this process."""

    def __init__(self, apps: list[Any]) -> None:
        self.apps = apps
        self.calls: list[Call] = []
        self.streams: list[Batches] = []
        self.lost_after = 1 << 30
        """How many batches arrive before a replica is lost."""

    def stream(self, call: Call) -> Batches:
        self.calls.append(call)
        self.streams.append(Batches(piped(self.apps[0], call), self.lost_after))
        return self.streams[-1]

    async def ask_all(self, call: Call) -> list[ReplicaAnswer]:
        self.calls.append(call)
        return [
            await ReplicaAnswer.of(f"replica{number}", piped(app, call))
            for number, app in enumerate(self.apps)
        ]


@pytest.fixture(scope="module")
def engines() -> Iterator[list[AsyncLLM]]:
    engines = [
        AsyncLLM("bundled", num_blocks=64, max_num_seqs=4, batch_invariant=True) for _ in range(2)
    ]
    yield engines
    for engine in engines:
        engine.shutdown()


@asynccontextmanager
async def fronted(
    engines: list[AsyncLLM], config: ServeConfig | None = None
) -> AsyncIterator[tuple[httpx2.AsyncClient, Local]]:
    """A client of a front, and the replicas that the front has."""
    config = config or ServeConfig()
    apps = [create_app(engine, config) for engine in engines]
    replicas = Local(apps)
    app = front_app(replicas, config)
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for each in apps:
            await each.router.lifespan_context(each).__aenter__()
        yield client, replicas


async def test_answers_are_those_of_the_application(engines):
    async with fronted(engines) as (client, replicas):
        plain = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(replicas.apps[0]), base_url="http://localhost"
        )
        chat = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 6, "seed": 2}
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"prompt": 7}),
            ("/nowhere", {}),
        ):
            one, other = [await each.post(path, json=body) for each in (client, plain)]
            assert one.status_code == other.status_code
            assert one.json().get("choices") == other.json().get("choices")
            assert one.json().get("error") == other.json().get("error")
        streamed = await client.post("/v1/completions", json={**BODY, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (
            await client.post("/v1/completions", content=b"{bad", headers=JSON)
        ).status_code == 400
        assert (await client.get("/v1/models")).json()["data"]


def test_what_every_replica_refuses_is_refused(engines):
    paths = ("/health", "/load", "/metrics", "/v1/models", "/mie/state", "/")

    async def statuses(config: ServeConfig, headers: dict[str, str]) -> set[int]:
        async with fronted(engines, config) as (client, _):
            return {(await client.get(path, headers=headers)).status_code for path in paths}

    foreign = {"host": "evil.example"}
    assert asyncio.run(statuses(ServeConfig(), foreign)) == {403}
    assert asyncio.run(statuses(ServeConfig(allowed_hosts=["evil.example"]), foreign)) == {200}
    locked = ServeConfig(keys=Keys.of(["sk-one"]))
    assert asyncio.run(statuses(locked, foreign)) == {200, 401}, "the page and /health are open"


@pytest.mark.parametrize(("path", "body"), DIALECTS.items())
async def test_a_lost_replica_is_a_503_or_the_last_event_of_a_stream(engines, path, body):
    body = {"model": "bundled", "stream": True, "ignore_eos": True, **body}
    begins = "event: error\ndata: {" if path in ("/v1/messages", "/v1/responses") else "data: {"
    begins = '{"error": "' if path.startswith("/api/") else begins
    async with fronted(engines) as (client, replicas):
        replicas.lost_after = 0
        answer = await client.post(path, json=body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        replicas.lost_after = 1
        with held(engines[0]):  # so that the first batch does not hold the whole answer
            answer = await client.post(path, json=body)
        assert answer.status_code == 200
        events = answer.text.removesuffix("data: [DONE]\n\n").strip()
        *_, last = events.split("\n" if path.startswith("/api/") else "\n\n")
        assert last.startswith(begins)
        assert "the replica that served the request is lost" in last


async def test_a_client_that_leaves_cancels_its_stream(engines):
    async with fronted(engines) as (client, replicas):
        with held(engines[0]) as hold:
            body = {**BODY, "max_tokens": 100, "ignore_eos": True}
            task = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await hold.reached()
            task.cancel()
            await asyncio.wait([task])
            assert replicas.streams[0].is_cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_call_frees_its_blocks_within_one_step(stream):
    engine = AsyncLLM("bundled", num_blocks=64, max_num_seqs=4)
    stepped = Stepped(engine)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    body = json.dumps({**BODY, "max_tokens": 500, "ignore_eos": True, "stream": stream}).encode()

    async def run() -> None:
        app = create_app(engine)
        async with app.router.lifespan_context(app):
            batches = piped(app, Call.of(scope, body, ""))
            first = asyncio.ensure_future(batches.__anext__())
            for _ in range(3):
                await asyncio.to_thread(stepped.step)
            await asyncio.to_thread(stepped.hold)
            if stream:
                assert (await first)[0]["status"] == 200
                await batches.aclose()
            else:
                first.cancel()
                await asyncio.wait([first])
            # The request's end is there, and the next step finds it.
            await asyncio.to_thread(eventually, lambda: loop_of(engine).has_mail)
            await asyncio.to_thread(stepped.step)

    try:
        asyncio.run(run())
        assert stepped.between_steps(lambda: stepped.engine.requests) == []
        assert stepped.scheduler.manager.num_used == 0
    finally:
        stepped.free()
        engine.shutdown()


async def test_messages_that_wait_are_joined():
    is_read = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"{}"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"a", b"b", b"c"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await is_read.wait()
        await send({"type": "http.response.body", "body": b"d"})

    call = Call.of({"type": "http", "path": "/"}, b"{}", "")
    batches = piped(app, call)
    head, body = await anext(batches)
    is_read.set()
    [[end]] = [batch async for batch in batches]
    assert head["status"] == 200
    assert (body["body"], body["more_body"]) == (b"abc", True)
    assert (end["body"], end.get("more_body", False)) == (b"d", False)


async def test_what_concerns_all_replicas_is_asked_of_all(engines):
    async with fronted(engines) as (client, _):
        await client.post("/v1/completions", json=BODY)
        health = (await client.get("/health")).json()
        assert health == {"status": "ok", "replicas": {"replica0": "ok", "replica1": "ok"}}
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        cancel = await client.post("/v1/requests/cmpl-0/cancel")
        assert cancel.status_code == 404
        lines = (await client.get("/metrics")).text.splitlines()
        heads = [line for line in lines if line.startswith("#")]
        assert len(heads) == len(set(heads))
        running = [line for line in lines if line.startswith("vllm:num_requests_running{")]
        assert [line.split('"')[1] for line in running] == ["replica0", "replica1"]
        engines[1].shutdown()
        health = await client.get("/health")
        assert health.status_code == 200
        assert health.json()["replicas"] == {"replica0": "ok", "replica1": "dead"}


async def test_without_a_replica_the_whole_is_unavailable():
    async with fronted([]) as (client, _):
        assert (await client.get("/health")).status_code == 503


def test_samples_with_and_without_labels_get_the_replica():
    text = (
        b'# HELP a A.\n# TYPE a gauge\na 1.0\n# HELP b B.\n# TYPE b counter\nb_total{x="y"} 2.0\n'
    )
    combine = combining("/metrics")
    assert combine is not None
    joined = combine([ReplicaAnswer(name, 200, {}, text) for name in ("r0", "r1")])
    assert joined.body.decode().splitlines() == [
        "# HELP a A.",
        "# TYPE a gauge",
        'a{replica="r0"} 1.0',
        'a{replica="r1"} 1.0',
        "# HELP b B.",
        "# TYPE b counter",
        'b_total{replica="r0",x="y"} 2.0',
        'b_total{replica="r1",x="y"} 2.0',
    ]


def test_keys_are_checked_by_replicas_and_separate_tenants(engines):
    keys = Keys.of(["one-key", "other-key"])

    async def calls(config: ServeConfig) -> list[Call]:
        async with fronted(engines[:1], config) as (client, replicas):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 401
            assert (await client.get("/metrics")).status_code == 401
            for key in ("one-key", "other-key"):
                headers = {"Authorization": f"Bearer {key}"}
                answer = await client.post("/v1/completions", json=BODY, headers=headers)
                assert answer.status_code == 200
            return replicas.calls[-2:]

    def homes(config: ServeConfig) -> set[bytes]:
        found = asyncio.run(calls(config))
        return {PrefixRouter().key(call.beginning, call.salt).home for call in found}

    assert len(homes(ServeConfig(keys=keys))) == 2
    assert len(homes(ServeConfig(keys=keys, share_prefix_cache=True))) == 1


async def test_the_path_of_a_proxy_crosses(engines):
    app = create_app(engines[0], ServeConfig())
    front = front_app(Local([app]), ServeConfig())
    transport = httpx2.ASGITransport(front, root_path="/mie")
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://localhost/mie") as client,
    ):
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/health")).json()["replicas"] == {"replica0": "ok"}
        assert (await client.post("/v1/completions", json=BODY)).json()["choices"]


async def test_a_long_body_is_refused_before_it_crosses(engines):
    async with fronted(engines[:1], ServeConfig(max_request_bytes=64)) as (client, replicas):
        answer = await client.post("/v1/completions", json={"prompt": "x" * 99})
        assert answer.status_code == 413
        assert replicas.calls == []
