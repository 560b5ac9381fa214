"""Streams at their edges: slow readers, long waits, cancelled requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from audit import loop_of
from deadlines import PATIENCE
from scripted_answers import answering
from stepped import Stepped, eventually

from mie import AsyncLLM
from mie.serve.app import create_app
from mie.serve.config import ServeConfig

PROMPT = list(range(100, 164))


class Exchange:
    """One request, called as ASGI servers call an application; the test reads when it wants to."""

    def __init__(self, app: Any, path: str, body: dict[str, Any], **headers: str) -> None:
        more = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), *more],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
            "app": app,
        }
        self._messages = [
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        ]
        self._has_left = asyncio.Event()
        self._sent: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)  # a reader with no buffer
        self.status: int | None = None
        self._is_over = False
        self.task = asyncio.ensure_future(self._app(self._scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self._sent.put(message)
        await self._sent.join()

    def leave(self) -> None:
        """Close the connection."""
        self._has_left.set()

    async def read(self) -> bytes:
        """The next piece of the body."""
        message = await asyncio.wait_for(self._sent.get(), PATIENCE)
        self._sent.task_done()
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return await self.read()
        self._is_over = not message.get("more_body")
        return message["body"]

    async def rest(self) -> list[bytes]:
        """All further pieces."""
        pieces = []
        while not self._is_over:
            pieces.append(await self.read())
        await self.task
        return pieces


@asynccontextmanager
async def serving(stepped: Stepped, **options: Any) -> AsyncIterator[Any]:
    app = create_app(stepped.llm, ServeConfig(**options))
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
def stepped():
    engine = AsyncLLM("bundled", num_blocks=64, max_num_seqs=4, max_num_batched_tokens=24)
    stepped = Stepped(engine)
    yield stepped
    stepped.free()
    engine.shutdown()


def events_of(pieces: list[bytes]) -> list[bytes]:
    return b"".join(pieces).split(b"\n\n")[:-1]


def text_of(pieces: list[bytes]) -> str:
    chunks = [json.loads(e[6:]) for e in events_of(pieces) if e.startswith(b"data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def test_a_slow_reader_gets_merged_chunks(stepped):
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "seed": 3, "stream": True}
    async with serving(stepped) as app:
        slow = Exchange(app, "/v1/completions", body)
        await asyncio.to_thread(stepped.step_until, lambda: num_generated(stepped) >= 2)
        first = await slow.read()
        # Nothing is read while the engine goes on, to the end.
        await asyncio.to_thread(stepped.step_until, lambda: num_generated(stepped) >= 39)
        stepped.step()
        await asyncio.to_thread(eventually, lambda: not stepped.engine.has_work)
        rest = await slow.rest()
        stepped.free()
        whole = Exchange(app, "/v1/completions", {**body, "stream": False})
        answer = json.loads(b"".join(await whole.rest()))
    text_chunks = [e for e in events_of([first, *rest]) if e.startswith(b"data: {")]
    assert len(text_chunks) <= 4  # the answer has 40 tokens
    assert events_of([first, *rest])[-1] == b"data: [DONE]"
    assert text_of([first, *rest]) == answer["choices"][0]["text"]


async def test_chunks_that_come_too_fast_are_merged(stepped):
    """With 1 chunk in 1,000 s all but two wait for a beat, which the test gives by hand."""
    body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "seed": 3, "stream": True}
    async with serving(stepped, max_chunks_per_second=0.001) as app:
        stream = Exchange(app, "/v1/completions", body)
        await asyncio.to_thread(stepped.hold)
        stepped.free()
        first = await stream.read()
        await asyncio.to_thread(eventually, lambda: not stepped.engine.has_work)
        rest = asyncio.ensure_future(stream.rest())
        while not rest.done():
            app.state.serving.pace.beat()
            await asyncio.sleep(0)
        events = events_of([first, *await rest])
    assert len([e for e in events if e.startswith(b"data: {")]) <= 3
    assert events[-1] == b"data: [DONE]"


async def test_a_stream_gets_comments_while_a_call_is_held_back(stepped):
    """Its tokens come, and nothing of them can be sent yet."""
    pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
    arguments = "x" * 40
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"messages": messages, "tools": tools, "stream": True}

    def step_to(count: int) -> None:
        stepped.step_until(lambda: num_generated(stepped) >= count)

    async with serving(stepped, keepalive_interval=1000) as app:
        with answering(stepped.llm, f'<tool_call>{{"a": "{arguments}"'):
            stream = Exchange(app, "/v1/chat/completions", asked)
            await asyncio.to_thread(step_to, 3)
        first = await stream.read()
        [writer] = app.state.serving.running.values()
        for count in (6, 9, 12):  # the ticks of a timer, which the test gives by hand
            await asyncio.to_thread(step_to, count)
            writer.tick()
        comment = await stream.read()
        stepped.free()
        first, comment, rest = first, comment, await stream.rest()
    assert b'"role": "assistant"' in first
    assert comment.startswith(b": keepalive ")
    assert arguments.encode() in b"".join(rest)


def test_a_reader_that_has_stopped_reading_may_leave(stepped):
    body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": True}

    async def main():
        async with serving(stepped) as app:
            stuck = Exchange(app, "/v1/completions", body)
            await asyncio.to_thread(stepped.step_until, lambda: num_generated(stepped) >= 2)
            await stuck.read()
            await asyncio.to_thread(stepped.step_until, lambda: num_generated(stepped) >= 6)
            stuck.leave()
            await stuck.task
            assert app.state.serving.running == {}
            await asyncio.to_thread(stepped.step)
            return await loop_of(stepped.llm).call_async(lambda: stepped.scheduler.manager.num_used)

    assert asyncio.run(main()) == 0


def num_generated(stepped: Stepped) -> int:
    return max((s.num_generated for r in stepped.engine.requests for s in r.sequences), default=0)


async def test_a_stream_that_waits_gets_comments_that_say_how_far_its_prompt_is(stepped):
    body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "stream": True}
    async with serving(stepped, keepalive_interval=0.01) as app:
        waiting = Exchange(app, "/v1/completions", body)
        comments = [await waiting.read()]
        await asyncio.to_thread(stepped.hold)
        stepped.step()
        await asyncio.to_thread(stepped.hold)  # 24 of 64 tokens are computed
        while comments[-1] == comments[0]:
            comments.append(await waiting.read())
        stepped.free()
        status, comments, rest = waiting.status, comments, await waiting.rest()
    assert status == 200
    assert comments[0] == b": keepalive 0/64\n\n"
    assert comments[-1] == b": keepalive 24/64\n\n"
    events = [event for event in events_of(rest) if not event.startswith(b": keepalive ")]
    assert events[-1] == b"data: [DONE]"
    assert len(events) > 1


async def test_the_usage_says_where_a_prompt_departs_after_the_headers_are_sent(stepped):
    asked = {"max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    async with serving(stepped, keepalive_interval=0.01) as app:
        waiting = Exchange(
            app, "/v1/completions", {"prompt": PROMPT, **asked}, x_mie_usage_details="1"
        )
        await waiting.read()
        await asyncio.to_thread(stepped.hold)
        stepped.free()
        rest = await waiting.rest()
    assert b"x-mie-prefix-departs" not in waiting.headers
    *_, last, end = events_of(rest)
    assert end == b"data: [DONE]"
    departure = {"token": 0, "of": 64, "reason": "new"}
    assert json.loads(last[6:])["usage"]["prefix_departs"] == departure


def test_no_comments_where_they_are_turned_off(stepped):
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True}

    async def main():
        async with serving(stepped, keepalive_interval=0) as app:
            waiting = Exchange(app, "/v1/completions", body)
            await asyncio.to_thread(stepped.hold)
            stepped.free()
            return await waiting.rest()

    assert b"keepalive" not in b"".join(asyncio.run(main()))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_can_be_cancelled_by_its_id(stepped, stream):
    body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": stream, "n": 2}
    async with serving(stepped) as app:
        running = Exchange(app, "/v1/completions", body)
        await asyncio.to_thread(stepped.step_until, lambda: num_generated(stepped) >= 2)
        [response_id] = app.state.serving.running
        cancel = Exchange(app, f"/v1/requests/{response_id}/cancel", {})
        await asyncio.to_thread(eventually, lambda: loop_of(stepped.llm).has_mail)
        stepped.step()
        cancelled = json.loads(b"".join(await cancel.rest()))
        pieces = await running.rest()
        again = Exchange(app, f"/v1/requests/{response_id}/cancel", {})
        await again.rest()
        response_id, cancelled, pieces, status, running = (
            response_id,
            cancelled,
            pieces,
            again.status,
            app.state.serving.running,
        )
    assert cancelled == {"id": response_id, "cancelled": True}
    assert status == 404
    assert running == {}
    assert stepped.scheduler.manager.num_used == 0
    if stream:
        chunks = [json.loads(e[6:]) for e in events_of(pieces) if e.startswith(b"data: {")]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        choices = json.loads(b"".join(pieces))["choices"]
    ended = {c["index"]: c["finish_reason"] for c in choices if c["finish_reason"]}
    assert ended == {0: "abort", 1: "abort"}


def test_what_every_stream_says_in_its_headers(server):
    answer = server.post("/v1/completions", prompt="A mill", stream=True, max_tokens=1)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
