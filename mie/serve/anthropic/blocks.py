"""The blocks of a streamed message, one after another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mie.frontend.outputs import CompletionOutput
from mie.serve.sse import json_string

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Map a type of block to the type of its deltas, and to the key of what is new."""


class Blocks:
    """Begins and ends blocks as the parts of an answer come."""

    def __init__(self) -> None:
        self.has_calls = False
        self._num_begun = 0
        self._open: tuple[str, int] | None = None  # its type, and which call it is

    def add(self, choice: CompletionOutput) -> Iterator[str]:
        """Yield the events of what is new."""
        block: dict[str, Any]
        if choice.reasoning:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._grow(block, 0, choice.reasoning)
        if choice.text:
            block = {"type": "text", "text": "", "citations": None}
            yield from self._grow(block, 0, choice.text)
        for call in choice.tool_calls or ():
            self.has_calls = True
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._grow(block, call.index, call.arguments)

    def end(self) -> Iterator[str]:
        """Yield the events that end the last block. A message has at least one."""
        if not self._num_begun:
            yield from self._grow({"type": "text", "text": "", "citations": None}, 0, "")
        yield from self._close()

    def _grow(self, block: dict[str, Any], number: int, text: str) -> Iterator[str]:
        kind = block["type"]
        if self._open != (kind, number):
            yield from self._close()
            self._open = kind, number
            self._num_begun += 1
            yield event(
                "content_block_start", {"index": self._num_begun - 1, "content_block": block}
            )
        if text:
            delta, key = _DELTAS[kind]
            yield (
                'event: content_block_delta\ndata: {"type": "content_block_delta", '
                f'"index": {self._num_begun - 1}, "delta": {{"type": "{delta}", "{key}": '
                f"{json_string(text)}}}}}\n\n"
            )

    def _close(self) -> Iterator[str]:
        if self._open is not None:
            self._open = None
            yield event("content_block_stop", {"index": self._num_begun - 1})


def event(name: str, fields: dict[str, Any]) -> str:
    """Return an event of Anthropic's."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n"
