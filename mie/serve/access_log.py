"""Log lines: one for each request, as text or as JSON.

A line names the key that was used, never the key itself. Texts of clients are escaped, so that
no client can forge a line. Prompts are in no line unless a setting adds them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mie.base.stats.request import RequestMetrics
from mie.errors import shown_text
from mie.serve.asgi import CLIENT_LEFT, facts_of, header, route_of
from mie.serve.metrics import ServerMetrics

logger = logging.getLogger("mie.access")

MAX_LOGGED = 256
"""Maximum characters of a request field in a log line."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
QUIET_ROUTES = frozenset({"/health", "/ready", "/ping", "/metrics", "/load"})
"""Routes that machines poll. Their requests are logged at the level DEBUG."""


class AccessLog:
    """Middleware that gives each request an id, and logs and counts requests."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: Collection[str]) -> None:
        """``paths`` are the paths of the routes. Metrics may have them as labels."""
        self._app = app
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope["mie.request_id"] = request_id = uuid.uuid4().hex
        facts_of(scope)
        status = 500
        start = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            return await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - start
            if scope.get("mie.client_left"):
                status = CLIENT_LEFT
            try:
                self._end(scope, status, seconds)
            except Exception as error:  # the answer is sent, and bookkeeping must not spoil it
                logger.error("a request is not counted", exc_info=error)

    def _end(self, scope: Scope, status: int, seconds: float) -> None:
        path, method = route_of(scope), scope["method"]
        route = path if path in self._paths else "other"
        done = scope["mie.facts"]
        if status != CLIENT_LEFT:
            status = done.pop("status", status)
        known_method = method if method in METHODS else "other"
        self._metrics.observe(route, known_method, status, seconds, done)
        level = logging.DEBUG if path in QUIET_ROUTES and status < 400 else logging.INFO
        if not logger.isEnabledFor(level):
            return
        client = scope.get("client")
        facts = {
            "method": method,
            "path": path[:MAX_LOGGED],
            "status": status,
            "seconds": round(seconds, 4),
            "request_id": scope["mie.request_id"],
            "client": client[0] if client else None,
            "key": scope.get("mie.client"),
            "client_request_id": (header(scope, b"x-request-id") or "")[:MAX_LOGGED] or None,
            **done,
        }
        facts = {name: value for name, value in facts.items() if value is not None}
        logger.log(level, "request", extra={"facts": facts})


def work_of(num_prompt: int, num_output: int, parts: Collection[RequestMetrics]) -> dict[str, Any]:
    """Return the tokens, seconds and counts of a request for its log line.

    ``parts`` are the metrics of its prompts that gave any output.
    """
    facts: dict[str, Any] = {
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "queue_seconds": None,
        "first_token_seconds": None,
        **dict.fromkeys(_COUNTS, 0),
        **dict.fromkeys(_RARE),
    }
    departures = [part.departure for part in parts if part.departure is not None]
    if departures:
        facts["departs_at"], facts["departs_because"] = departures[0].position, departures[0].reason
    for part in parts:
        times = (part.queue_time, part.time_to_first_token)
        for name, seconds in zip(("queue_seconds", "first_token_seconds"), times, strict=True):
            if seconds is not None:
                facts[name] = max(facts[name] or 0.0, round(seconds, 4))
        for name in _COUNTS:
            facts[name] += getattr(part, name)
        for name in _RARE:
            facts[name] = (facts[name] or 0) + getattr(part, name) or None
    return facts


_COUNTS = (
    *("num_cached_tokens", "num_preemptions", "num_swaps", "num_recomputed_tokens"),
    "num_copied_blocks",
)
_RARE = ("num_reasoning_tokens", "num_tool_calls", "num_unparsed_calls")
"""Counts that a line has only if they are not zero."""


def escaped(text: str) -> str:
    """Return a text on one line: unprintable characters are written as in Python's literals."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class TextFormat(logging.Formatter):
    """Lines for people. A record of several lines is indented, so that it looks like no other."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line or lines."""
        facts = getattr(record, "facts", None)
        if facts:
            message = " ".join(f"{name}={_value(value)}" for name, value in facts.items())
        else:
            message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        text = f"mie: {record.levelname.lower()}: {message}"
        return "\n    ".join(map(escaped, text.splitlines()))


class JsonFormat(logging.Formatter):
    """One JSON object on each line, for machines."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as an object with its time, level, logger, message and facts."""
        when = datetime.fromtimestamp(record.created, timezone.utc)
        entry: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _value(value: object) -> str:
    """Return a value without spaces, or quoted."""
    text = shown_text(value) if isinstance(value, str) else str(value)
    return repr(text) if " " in text and text[:1] not in "'\"[{" else text


@contextmanager
def logging_as(format: str) -> Iterator[None]:
    """Write the records of mie and of its libraries to standard error, as ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormat() if format == "json" else TextFormat())
    loggers = [logging.getLogger(name) for name in ("mie", "uvicorn", "asyncio")]
    before = [(each.level, each.handlers[:]) for each in loggers]
    for each in loggers:
        each.handlers[:] = [handler]  # others would not escape the texts of clients
        if each.level == logging.NOTSET:
            each.setLevel(logging.INFO)
    try:
        yield
    finally:
        for each, (level, handlers) in zip(loggers, before, strict=True):
            each.handlers[:] = handlers
            each.setLevel(level)
