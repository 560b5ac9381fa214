"""The front: an ASGI application that passes each request to a replica, or to all of them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from asyncio import CancelledError
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mie.frontend.routing import beginning_of
from mie.serve.asgi import (
    DONE,
    NDJSON,
    SSE,
    Failures,
    RootPath,
    WholeBody,
    answer,
    header,
    route_of,
)
from mie.serve.config import ServeConfig
from mie.serve.errors import ApiError, body_of, unavailable

_CROSSES = (
    *("type", "http_version", "method", "scheme", "root_path", "path", "raw_path"),
    *("query_string", "headers", "client", "server"),
)
"""The keys of an ASGI scope that cross. The rest belongs to the process with the connection."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """An HTTP request on its way to a replica, and the parts of it that a router reads."""

    scope: Mapping[str, Any]
    body: bytes
    beginning: bytes
    salt: str

    @classmethod
    def of(cls, scope: Scope, body: bytes, tenant: str) -> Call:
        """Return the request that has arrived. A replica refuses a body that is not JSON."""
        try:
            values = json.loads(body)
        except (ValueError, RecursionError):
            values = None
        values = values if isinstance(values, dict) else {}
        return cls(
            scope={name: scope[name] for name in _CROSSES if name in scope},
            body=body,
            beginning=beginning_of(values),
            salt=f"{tenant}\0{values.get('cache_salt')}",
        )

    @property
    def prompt(self) -> str:
        """The text that Ray's own prefix-aware router compares. It may not be empty."""
        return self.beginning.decode()


class ReplicaAnswer(NamedTuple):
    """A replica's whole answer to a request that goes to all of them."""

    replica: str
    status: int
    headers: Mapping[str, str]
    """Without the length of the body, because the body may be replaced."""
    body: bytes

    @classmethod
    async def of(cls, replica: str, batches: AsyncIterable[list[Message]]) -> ReplicaAnswer:
        """Return the answer that messages make up."""
        head, *rest = [message async for batch in batches for message in batch]
        body = b"".join(message.get("body", b"") for message in rest)
        headers = {**Headers(raw=head["headers"])}
        headers.pop("content-length", None)
        return cls(replica, head["status"], headers, body)


async def piped(app: ASGIApp, call: Call) -> AsyncGenerator[list[Message], None]:
    """Yield the messages of the answer. Pieces of the body that wait are joined.

    Closing the generator, or cancelling its task, reports to the application that the client has
    left.
    """
    waiting: list[Message] = []
    request: list[Message] = [{"type": "http.request", "body": call.body}]
    news, has_left = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        if request:
            return request.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if waiting and waiting[-1]["type"] == message["type"]:  # a piece of the body
            message = {**message, "body": waiting.pop().get("body", b"") + message.get("body", b"")}
        waiting.append(message)
        news.set()

    work = asyncio.ensure_future(app(dict(call.scope), receive, send))
    work.add_done_callback(lambda _: news.set())
    try:
        while waiting or not work.done():
            await news.wait()
            news.clear()
            if waiting:
                taken, waiting[:] = waiting[:], []
                yield taken
        work.result()
    finally:
        has_left.set()
        await asyncio.wait([work])


logger = logging.getLogger(__name__)


class Batches(Protocol):
    """An answer on its way: batches of messages, as `piped` yields them."""

    def __aiter__(self) -> AsyncIterator[list[Message]]:
        """Return the batches. They end with an exception if the replica is lost."""

    def cancel(self) -> None:
        """Report to the replica that the client has left. It never waits."""


class Replicas(Protocol):
    """The way to the replicas."""

    def stream(self, call: Call) -> Batches:
        """Return the answer of the replica that a router chooses."""

    async def ask_all(self, call: Call) -> list[ReplicaAnswer]:
        """Return the answers of those replicas that answer in time."""


def front_app(replicas: Replicas, config: ServeConfig) -> Starlette:
    """Return the application in front of replicas.

    The replicas' own applications check keys and count waiting requests.
    """
    app = Starlette(
        routes=[Mount("/", app=Front(replicas, config))],
        middleware=[
            Middleware(Failures),
            *([Middleware(RootPath, path=config.root_path)] if config.root_path else []),
            Middleware(WholeBody, max_bytes=config.max_request_bytes),
        ],
    )
    app.router.redirect_slashes = False
    return app


class Front:
    """Hands requests over, and the answers back."""

    def __init__(self, replicas: Replicas, config: ServeConfig) -> None:
        self._replicas = replicas
        self._has_tenants = config.keys is not None and not config.share_prefix_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = route_of(scope)
        message = await receive()  # `WholeBody` has read it all
        tenant = ""
        if self._has_tenants:
            tenant = header(scope, b"authorization") or header(scope, b"x-api-key") or ""
        call = Call.of(scope, message.get("body", b""), tenant)
        combine = combining(route)
        if combine is None:
            await self._hand_over(call, scope, receive, send)
        else:
            await self._ask_all(call, combine, scope, receive, send)

    async def _hand_over(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a replica's answer on, or report that the replica is lost."""
        batches = self._replicas.stream(call)
        head: Message | None = None
        try:
            async for batch in batches:
                for message in batch:
                    head = head or message
                    await send(message)
        except CancelledError:  # the client has left
            batches.cancel()
            raise
        except Exception as error:
            logger.error("a replica failed: %s", " ".join(str(error).split())[:400])
            lost = unavailable("the replica that served the request is lost (try again)", 1)
            if head is None:
                await answer(lost, scope, receive, send)
            elif (kind := _media_type(head)) in (NDJSON, SSE):
                last = _event(lost, route_of(scope), kind)
                await send({"type": "http.response.body", "body": last})
            else:
                raise  # the answer cannot be completed

    async def _ask_all(
        self, call: Call, combine: Combine, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer with the common answer of all replicas."""
        answers = await self._replicas.ask_all(call)
        if not answers:
            await answer(unavailable("no replica serves", 1), scope, receive, send)
            return
        whole = combine(answers)
        await Response(whole.body, whole.status, whole.headers)(scope, receive, send)


def _media_type(head: Message) -> str:
    return Headers(raw=head["headers"]).get("content-type", "").partition(";")[0]


def _event(error: ApiError, route: str, media_type: str) -> bytes:
    """Return the last events of a stream, in the dialect of the route."""
    data = body_of(error, route)
    if media_type == NDJSON:
        return f"{data}\n".encode()
    begin = "event: error\n" if route in ("/v1/messages", "/v1/responses") else ""
    end = DONE if route.endswith("/completions") else ""
    return f"{begin}data: {data}\n\n{end}".encode()


# The common answer of all replicas.

_FAMILY = re.compile(r"(# HELP .*\n# TYPE .*\n)((?:[^#\n].*\n)*)")

Combine: TypeAlias = Callable[[Sequence[ReplicaAnswer]], ReplicaAnswer]


def _metrics(answers: Sequence[ReplicaAnswer]) -> ReplicaAnswer:
    """Return all samples in Prometheus' text format, with a label for the replica."""
    worst = _worst(answers)
    if worst.status != 200:
        return worst
    families: dict[str, str] = {}
    for each in answers:
        label = f'{{replica="{each.replica}"'
        for head, samples in _FAMILY.findall(each.body.decode()):
            samples = re.sub(r"^([\w:]+)\{", rf"\1{label},", samples, flags=re.MULTILINE)
            samples = re.sub(r"^([\w:]+) ", rf"\1{label}}} ", samples, flags=re.MULTILINE)
            families[head] = families.get(head, "") + samples
    return answers[0]._replace(body="".join(map("".join, families.items())).encode())


def _health(answers: Sequence[ReplicaAnswer]) -> ReplicaAnswer:
    """Return that the whole serves if any replica does, and the state of each."""
    best = _best(answers)
    if best.status not in (200, 503):  # every replica refuses the request
        return best
    each = {answer.replica: json.loads(answer.body)["status"] for answer in answers}
    body = {"status": each[best.replica], "replicas": each}
    return best._replace(body=json.dumps(body).encode())


def _load(answers: Sequence[ReplicaAnswer]) -> ReplicaAnswer:
    worst = _worst(answers)
    if worst.status != 200:
        return worst
    total = sum(json.loads(answer.body)["server_load"] for answer in answers)
    return answers[0]._replace(body=json.dumps({"server_load": total}).encode())


def _best(answers: Sequence[ReplicaAnswer]) -> ReplicaAnswer:
    return min(answers, key=lambda answer: answer.status)


def _worst(answers: Sequence[ReplicaAnswer]) -> ReplicaAnswer:
    return max(answers, key=lambda answer: answer.status)


_OF_ROUTES: Mapping[str, Combine] = MappingProxyType(
    {
        "/metrics": _metrics,
        "/health": _health,
        "/ready": _health,
        "/ping": _health,
        "/load": _load,
        "/reset_prefix_cache": _worst,
    }
)


def combining(route: str) -> Combine | None:
    """Return how the answers to a route are combined, or None if one replica answers it."""
    if route.startswith("/v1/requests/"):  # a cancelled request runs on one of them
        return _best
    return _OF_ROUTES.get(route)
