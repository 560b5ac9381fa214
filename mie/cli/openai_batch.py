"""Read requests in the form of OpenAI's batch files, and write the records that answer them.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}

The names are those of OpenAI's batch and completion interfaces.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.errors import RequestError

if TYPE_CHECKING:
    from mie.frontend.outputs import CompletionOutput, Logprob, LogprobRow, RequestOutput

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_LABELS = ("user", "metadata", "store")  # for OpenAI's records; they do not change the answer


def is_batch_line(values: Mapping[str, Any]) -> bool:
    """Return whether a JSON line has the batch form."""
    return "url" in values or "body" in values


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    """A line of a batch file. The caller keeps its ``custom_id``."""

    values: Mapping[str, Any]
    source: str

    @property
    def is_chat(self) -> bool:
        """Whether the line has chat messages."""
        return self.values.get("url") == CHAT_URL

    def request(self, model: str) -> dict[str, Any]:
        """Return the line as a plain request: a prompt or messages, and sampling parameters.

        Raises:
            RequestError: the line is malformed, names another model, or has a parameter without
                effect here.
        """
        values = {name: value for name, value in self._body().items() if name not in _LABELS}
        asked = values.pop("model", model)
        if asked not in (model, Path(model).name):
            raise RequestError(
                f"{self.source}: model {asked!r} is not loaded; this run uses {model!r}"
                " (change the line, or --model)"
            )
        if values.pop("stream", False):
            raise RequestError(f"{self.source}: stream must be false in a batch")
        if self.is_chat:
            self._read_chat(values)
        else:
            self._read_completion(values)
        if isinstance(values.get("logit_bias"), dict):
            values["logit_bias"] = self._biases(values["logit_bias"])
        return {name: value for name, value in values.items() if value is not None}

    def _body(self) -> Mapping[str, Any]:
        unknown = self.values.keys() - {"method", "url", "body"}
        if unknown:
            raise RequestError(f"{self.source}: a batch line has no field {min(unknown)!r}")
        method = self.values.get("method", "POST")
        if method != "POST":
            raise RequestError(f"{self.source}: method must be 'POST', got {method!r}")
        url, body = self.values.get("url"), self.values.get("body")
        if url not in (CHAT_URL, COMPLETIONS_URL):
            raise RequestError(
                f"{self.source}: url must be {CHAT_URL!r} or {COMPLETIONS_URL!r}, got {url!r}"
            )
        if not isinstance(body, dict):
            raise RequestError(f"{self.source}: body must be a JSON object, got {body!r}")
        return body

    def _read_chat(self, values: dict[str, Any]) -> None:
        if "messages" not in values:
            raise RequestError(f"{self.source}: a body for {CHAT_URL} needs messages")
        if "max_completion_tokens" in values:
            values["max_tokens"] = values.pop("max_completion_tokens")
        wanted, num_top = values.pop("logprobs", None), values.pop("top_logprobs", None)
        if wanted not in (True, False, None):
            raise RequestError(f"{self.source}: logprobs must be true or false, got {wanted!r}")
        if num_top and not wanted:
            raise RequestError(f"{self.source}: top_logprobs needs logprobs to be true")
        if wanted:
            values["logprobs"] = num_top or 0

    def _read_completion(self, values: dict[str, Any]) -> None:
        if "prompt" not in values:
            raise RequestError(f"{self.source}: a body for {COMPLETIONS_URL} needs a prompt")
        prompt = values["prompt"]
        if isinstance(prompt, list):
            if not all(isinstance(token_id, int) for token_id in prompt):
                raise RequestError(
                    f"{self.source}: a prompt is a text or token ids; give each text its own line"
                )
            values["prompt_token_ids"] = values.pop("prompt")

    def _biases(self, biases: Mapping[str, Any]) -> dict[int, Any]:
        """Convert the keys, which are text in JSON, to token ids."""
        try:
            return {int(token_id): bias for token_id, bias in biases.items()}
        except ValueError as error:
            raise RequestError(f"{self.source}: logit_bias: {error}") from error

    def answer(self, output: RequestOutput, model: str) -> dict[str, Any]:
        """Return the record of an answered line, without its ``custom_id``."""
        num_prompt = len(output.prompt_token_ids)
        num_output = sum(len(choice.token_ids) for choice in output.outputs)
        kind = "chatcmpl" if self.is_chat else "cmpl"
        body = {
            "id": f"{kind}-{output.request_id}",
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [(_message if self.is_chat else _text)(choice) for choice in output.outputs],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_output,
                "total_tokens": num_prompt + num_output,
                "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
            },
        }
        response = {"status_code": 200, "request_id": output.request_id, "body": body}
        return {"id": f"batch_req_{output.request_id}", "response": response, "error": None}


def refusal(message: str) -> dict[str, Any]:
    """Return the record of a line that could not be served, without its ``custom_id``."""
    return {"response": None, "error": {"code": "invalid_request", "message": message}}


def _message(choice: CompletionOutput) -> dict[str, Any]:
    message = {"role": "assistant", "content": choice.text}
    if choice.reasoning is not None:
        message["reasoning"] = choice.reasoning
    return {
        "index": choice.index,
        "message": message,
        "logprobs": choice.logprobs and {"content": [_chat_row(row) for row in choice.logprobs]},
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def _chat_row(row: LogprobRow) -> dict[str, Any]:
    chosen, *_ = row.values()
    return {**_chat_token(chosen), "top_logprobs": [_chat_token(each) for each in row.values()]}


def _chat_token(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token or ""
    return {"token": token, "logprob": entry.logprob, "bytes": list(token.encode())}


def _text(choice: CompletionOutput) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": choice.logprobs and _text_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def _text_logprobs(rows: list[LogprobRow]) -> dict[str, Any]:
    chosen = [next(iter(row.values())) for row in rows]
    return {
        "tokens": [entry.decoded_token for entry in chosen],
        "token_logprobs": [entry.logprob for entry in chosen],
        "top_logprobs": [{e.decoded_token: e.logprob for e in row.values()} for row in rows],
    }
