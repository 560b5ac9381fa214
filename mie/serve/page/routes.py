"""The routes of the page's data: the live stream, the past, and the text of blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mie.errors import RequestError, TraceError, shown
from mie.events import Segment
from mie.events.replay import State, at
from mie.frontend.async_llm import AsyncLLM
from mie.page.assets import RECORDED_RUNS
from mie.page.cells import NodeText, encode, key_record, seq_from
from mie.page.recording import Recording
from mie.serve.asgi import EventStream
from mie.serve.config import ServeConfig
from mie.serve.errors import ApiError, invalid
from mie.serve.page.access import check_may_see, may_read_text
from mie.serve.page.feed import Feed
from mie.serve.page.processes import Worker
from mie.serve.page.shell import DATA_HEADERS, NDJSON
from mie.serve.serving import Serving
from mie.structured.descriptions import library

MAX_BLOCKS_ASKED = 512
HISTORY_RECORDS = 200
HISTORY_STEPS = 1000
"""Steps of the past that a page gets at least when it opens, if the log has them."""


class PageRoutes:
    """The routes of one engine's data, and their common state."""

    def __init__(self, engine: AsyncLLM, config: ServeConfig, name: str) -> None:
        self.feed = Feed(engine, name)
        self._engine = engine
        self._config = config
        self._name = name
        self._worker = Worker("mie-page-replay")

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/mie/config", self._tell_config),
            Route("/mie/events", self._events),
            Route("/mie/history", self._history),
            Route("/mie/state", self._state),
            Route("/mie/text", self._text),
            Route("/mie/why", self._why),
        ]

    async def close(self) -> None:
        """End the live streams and the threads."""
        await self.feed.close()
        self._worker.close()

    async def _tell_config(self, request: Request) -> Response:
        check_may_see(request)
        serving: Serving = request.app.state.serving
        facts, settings = serving.facts, self._engine.engine_config
        limits = {
            "max_num_seqs": facts.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "max_model_len": facts.max_model_len,
            "block_size": facts.block_size,
            "num_blocks": facts.num_blocks,
            "max_logprobs": self._config.max_logprobs,
            "max_request_bytes": self._config.max_request_bytes,
            "event_log_steps": settings.event_log_steps,
        }
        return _json(
            {
                "mode": "live",
                "model": serving.names[0],
                "client": request.scope.get("mie.client"),
                "has_keys": self._config.has_keys,
                "demo": self._config.demo,
                "has_structured": _has_structured(),
                "has_chat": serving.has_chat_template,
                "may_read_text": may_read_text(self._config, request.scope),
                "runs": [{"name": each.name, "title": each.title} for each in RECORDED_RUNS],
                "limits": limits,
            }
        )

    async def _events(self, request: Request) -> EventStream:
        check_may_see(request)
        events = await self.feed.events(request.headers.get("last-event-id"))
        return EventStream(events, headers=DATA_HEADERS)

    async def _history(self, request: Request) -> Response:
        self._check_may_ask(request)
        until = _number(request, "until")
        segments = await self._segments()

        def write() -> bytes:
            past = _past(segments, until)
            if not past:
                return b""
            num_steps = sum(len(segment.steps) for segment in past)
            recording = Recording(
                past,
                NodeText(shows_tokens=False),
                steps_per_record=max(1, num_steps // HISTORY_RECORDS),
            )
            return "".join(line + "\n" for line in recording.lines(self._name)).encode()

        content = await self._worker.call(write)
        return Response(content, headers=DATA_HEADERS, media_type=NDJSON)

    async def _state(self, request: Request) -> Response:
        self._check_may_ask(request)
        text = NodeText(shows_tokens=False)
        if "step" not in request.query_params:
            return _json(await self.feed.key())
        state = await self._state_at(_number(request, "step"))
        return _json(await self._worker.call(lambda: encode(key_record(state, text))))

    async def _text(self, request: Request) -> Response:
        self._check_may_ask(request)
        if not may_read_text(self._config, request.scope):
            raise ApiError(
                403,
                "this server has no keys, so that it tells the text of prompts to its own machine "
                "only (start it with --api-key to read them from elsewhere)",
                code="text_forbidden",
            )
        blocks = _blocks(request)
        tokens: dict[int, Sequence[int]]
        if "step" not in request.query_params:
            step, tokens, places = await self.feed.tokens(blocks)
            tokens.update(await self._engine.tokens_of(places))
        else:
            step = _number(request, "step")
            tree = (await self._state_at(step)).blocks.tree
            tokens = {block: tree[block].tokens for block in blocks if block in tree}
        serving: Serving = request.app.state.serving
        decode = None if serving.tokenizer is None else serving.tokenizer.decode
        found = {
            str(block): {
                "tokens": list(tokens[block]),
                "text": None if decode is None else decode(list(tokens[block])),
            }
            if block in tokens
            else None
            for block in blocks
        }
        return _json({"step": step, "blocks": found})

    async def _why(self, request: Request) -> Response:
        self._check_may_ask(request)
        name = request.query_params.get("seq", "")
        seq = seq_from(name)
        if seq is None:
            raise invalid(f"seq must be a sequence, such as 7.0; got {shown(name)}", "seq")
        wait = await self._engine.why_waiting(seq)
        if wait is None:
            sentence = "It does not wait: it runs, or has ended."
            return _json({"seq": name, "because": None, "sentence": sentence})
        return _json({"seq": name, **vars(wait), "sentence": wait.sentence})

    # Parts of the above.

    def _check_may_ask(self, request: Request) -> None:
        """Raise the error of a client that may not see the page, or asks about another server."""
        check_may_see(request)
        server = request.query_params.get("server", self.feed.run_id)
        if server != self.feed.run_id:
            raise ApiError(
                404,
                f"this is server {self.feed.run_id}, not {shown(server)}, which has ended",
                code="other_server",
            )

    async def _segments(self) -> Sequence[Segment]:
        look = await self._engine.look()
        return look.segments or ()

    async def _state_at(self, step: int) -> State:
        segments = await self._segments()
        try:
            return await self._worker.call(lambda: at(segments, step))
        except TraceError as error:
            raise ApiError(404, str(error), code="no_such_step") from error


def _past(segments: Sequence[Segment], until: int) -> list[Segment]:
    """Return the last segments up to a step, with `HISTORY_STEPS` steps or a few more."""
    found: list[Segment] = []
    for segment in reversed(segments):
        if segment.after > until:
            continue
        steps = [each for each in segment.steps if each[-1][1]["step"] <= until]
        found.insert(0, Segment(after=segment.after, snapshot=segment.snapshot, steps=steps))
        if sum(len(each.steps) for each in found) >= HISTORY_STEPS:
            break
    return found


def _has_structured() -> bool:
    """Return whether the extra ``structured`` is installed."""
    try:
        library()
    except RequestError:
        return False
    return True


def _json(value: str | bytes | Mapping[str, Any]) -> Response:
    content = value if isinstance(value, (str, bytes)) else encode(value)
    return Response(content, headers=DATA_HEADERS, media_type="application/json")


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise invalid(f"{name} must be the number of a step; got {shown(text)}", name)
    return int(text)


def _blocks(request: Request) -> list[int]:
    texts = request.query_params.get("blocks", "").split(",", MAX_BLOCKS_ASKED)
    if not all(text.isascii() and text.isdecimal() and len(text) < 19 for text in texts):
        raise invalid(f"blocks must be at most {MAX_BLOCKS_ASKED} block ids, such as 1,2", "blocks")
    return list(map(int, texts))
