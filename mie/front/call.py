"""What crosses the hop between the front and a replica."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import Message, Scope

from mie.routing import beginning_of

_CROSSES = (
    "type",
    "http_version",
    "method",
    "scheme",
    "root_path",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
)
"""What crosses of an ASGI scope. The rest belongs to the process that has the connection."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """An HTTP request on its way to a replica, and what a router reads of it."""

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
        """What Ray's own prefix-aware router compares, which may not be empty."""
        return self.beginning.decode()


class Answer(NamedTuple):
    """A replica's whole answer to a request that goes to all of them."""

    replica: str
    status: int
    headers: Mapping[str, str]
    """Without the length of the body, which may be replaced."""
    body: bytes

    @classmethod
    async def of(cls, replica: str, batches: AsyncIterable[list[Message]]) -> Answer:
        """Return the answer that messages make up."""
        head, *rest = [message async for batch in batches for message in batch]
        body = b"".join(message.get("body", b"") for message in rest)
        headers = {**Headers(raw=head["headers"])}
        headers.pop("content-length", None)
        return cls(replica, head["status"], headers, body)
