"""The events of a streamed message."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from mie.frontend.outputs import CompletionOutput, RequestOutput
from mie.serve.errors import (
    anthropic_body,
    refuse_failed,
    refuse_unfinished,
    stream_error,
)
from mie.serve.serving import Generation
from mie.serve.sse import json_string

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


class MessageWriter:
    """Turns outputs into the events of one message."""

    def __init__(self, generation: Generation, model: str) -> None:
        self._generation = generation
        self._model = model
        self._num_tokens = 0
        self._has_begun = False

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        refuse_failed(outputs)
        [output] = outputs
        choice = output.outputs[0]
        return {
            **message_of(self._generation.job.response_id, self._model),
            "content": [{"type": "text", "text": choice.text, "citations": None}],
            **stop_of(choice),
            "usage": usage_of(output, len(choice.token_ids)),
        }

    async def events(self, outputs: list[RequestOutput]) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream; ``outputs`` came already."""
        generation = self._generation
        try:
            while True:
                events = self._render(outputs) if outputs else _event("ping", {})
                if events:
                    yield events.encode()
                if generation.is_finished:
                    return
                outputs = await generation.next()
        except Exception as error:
            body = anthropic_body(stream_error(error))
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
                if choice.text:
                    pieces.append(
                        'event: content_block_delta\ndata: {"type": "content_block_delta", '
                        '"index": 0, "delta": {"type": "text_delta", "text": '
                        f"{json_string(choice.text)}}}}}\n\n"
                    )
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
        block = {"type": "text", "text": "", "citations": None}
        return [
            _event("message_start", {"message": message}),
            _event("content_block_start", {"index": 0, "content_block": block}),
        ]

    def _end(self, output: RequestOutput, choice: CompletionOutput) -> list[str]:
        return [
            _event("content_block_stop", {"index": 0}),
            _event(
                "message_delta",
                {"delta": stop_of(choice), "usage": usage_of(output, self._num_tokens)},
            ),
            _event("message_stop", {}),
        ]


def message_of(response_id: str, model: str) -> dict[str, Any]:
    """Return the fields that say which message it is."""
    return {"id": response_id, "type": "message", "role": "assistant", "model": model}


def stop_of(choice: CompletionOutput) -> dict[str, Any]:
    """Return why a message ended.

    Raises:
        ApiError: it was aborted.
    """
    refuse_unfinished(choice)
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
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


def _event(name: str, fields: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n"
