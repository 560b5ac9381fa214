"""The events of a streamed message."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from mie.frontend.outputs import CompletionOutput, RequestOutput
from mie.serve.anthropic.blocks import Blocks, event
from mie.serve.errors import (
    anthropic_body,
    refuse_failed,
    refuse_unfinished,
)
from mie.serve.serving import Generation

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessageWriter:
    """Turns outputs into the events of one message."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation = generation
        self._model = model
        self._num_tokens = 0
        self._has_begun = False
        self._blocks = Blocks()

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        refuse_failed(outputs)
        [output] = outputs
        choice = output.outputs[0]
        return {
            **message_of(self._generation.job.response_id, self._model),
            "content": content_of(choice),
            **stop_of(choice, bool(choice.tool_calls)),
            "usage": usage_of(output, len(choice.token_ids)),
        }

    async def events(self, outputs: list[RequestOutput]) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream; ``outputs`` came already."""
        generation = self._generation
        try:
            while True:
                events = self._render(outputs)
                if not events and generation.is_overdue:
                    events = event("ping", {})
                if events:
                    yield events.encode()
                    generation.sent()
                if generation.is_finished:
                    return
                outputs = await generation.next()
        except Exception as error:
            body = anthropic_body(generation.failed(error))
            yield f"event: error\ndata: {json.dumps(body)}\n\n".encode()

    def _render(self, outputs: list[RequestOutput]) -> str:
        refuse_failed(outputs)
        pieces: list[str] = []
        for output in outputs:
            if not self._has_begun:
                self._has_begun = True
                pieces += self._begin(output)
            for choice in output.outputs:
                self._num_tokens += len(choice.token_ids)
                pieces += self._blocks.add(choice)
                if choice.finish_reason is not None:
                    pieces += self._end(output, choice)
        return "".join(pieces)

    def _begin(self, output: RequestOutput) -> list[str]:
        message = {
            **message_of(self._generation.job.response_id, self._model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(output, 0),
        }
        return [event("message_start", {"message": message})]

    def _end(self, output: RequestOutput, choice: CompletionOutput) -> list[str]:
        usage = usage_of(output, self._num_tokens)
        delta = stop_of(choice, self._blocks.has_calls)
        return [
            *self._blocks.end(),
            event("message_delta", {"delta": delta, "usage": usage}),
            event("message_stop", {}),
        ]


def message_of(response_id: str, model: str) -> dict[str, Any]:
    """Return the fields that say which message it is."""
    return {"id": response_id, "type": "message", "role": "assistant", "model": model}


def content_of(choice: CompletionOutput) -> list[dict[str, Any]]:
    """Return the blocks of a whole message. A call that was cut is left out."""
    content: list[dict[str, Any]] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.text:
        content.append({"type": "text", "text": choice.text, "citations": None})
    for call in choice.tool_calls or ():
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            continue
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return content or [{"type": "text", "text": "", "citations": None}]


def stop_of(choice: CompletionOutput, has_calls: bool = False) -> dict[str, Any]:
    """Return why a message ended.

    Raises:
        ApiError: it was aborted.
    """
    refuse_unfinished(choice)
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    if has_calls and choice.finish_reason == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = _STOP_REASONS.get(choice.finish_reason or "", choice.finish_reason)
    return {"stop_reason": reason, "stop_sequence": None}


def usage_of(output: RequestOutput, num_output: int) -> dict[str, Any]:
    """Return Anthropic's ``usage``, whose ``input_tokens`` leaves out what the cache had."""
    num_cached = output.num_cached_tokens or 0
    return {
        "input_tokens": len(output.prompt_token_ids) - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }
