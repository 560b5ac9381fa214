"""Write answers as JSON, the large ones in parts and outside the event loop.

Log-probabilities make an answer hundreds of times as large as its text. `json.dumps` would hold
the interpreter until the last byte is written, and sending it all at once would copy it again.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

PART_BYTES = 1 << 16
"""Size of a part. A part is written at once."""


def json_pieces(value: Any) -> Iterator[str]:
    """Yield the JSON of a value in pieces. An iterator becomes a list, one item after another."""
    if isinstance(value, dict):
        before = "{"
        for key, each in value.items():
            yield f"{before}{json.dumps(key, ensure_ascii=False)}: "
            yield from json_pieces(each)
            before = ", "
        yield "{}" if before == "{" else "}"
    elif isinstance(value, Iterator):
        before = "["
        for each in value:
            yield before + json.dumps(each, ensure_ascii=False)
            before = ", "
        yield "[]" if before == "[" else "]"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        before = "["
        for each in value:
            yield before
            yield from json_pieces(each)
            before = ", "
        yield "]"
    else:
        yield json.dumps(value, ensure_ascii=False)


def json_text(value: Any) -> str:
    """Return the JSON of a small value, in which an iterator becomes a list."""
    return json.dumps(value, ensure_ascii=False, default=list)


def written(value: Any, is_wanted: Callable[[], bool]) -> list[bytes]:
    """Return the JSON of a value in parts, or stop when it is not needed any more.

    Call it in a thread. Before each piece, it yields to other threads.
    """
    parts: list[bytes] = []
    pieces: list[str] = []
    num_characters = 0
    for piece in json_pieces(value):
        pieces.append(piece)
        num_characters += len(piece)
        if num_characters >= PART_BYTES:
            parts.append("".join(pieces).encode())
            pieces.clear()
            num_characters = 0
            if not is_wanted():
                return []
        time.sleep(0)
    parts.append("".join(pieces).encode())
    return parts


class LargeAnswer:
    """An answer in parts. Each part is forgotten once it is sent."""

    def __init__(
        self, parts: list[bytes], headers: Mapping[str, str], on_end: Callable[[], object]
    ) -> None:
        """``on_end`` is called when the answer is sent, or cannot be sent."""
        self._parts = parts
        self._headers = headers
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = sum(map(len, self._parts))
        headers = {**self._headers, "content-length": str(num_bytes)}
        raw = Headers({**headers, "content-type": "application/json"}).raw
        try:
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            self._parts.reverse()
            while self._parts:
                body = self._parts.pop()
                more = bool(self._parts)
                await send({"type": "http.response.body", "body": body, "more_body": more})
                await asyncio.sleep(0)  # other requests have their turn
        finally:
            self._parts.clear()
            self._on_end()
