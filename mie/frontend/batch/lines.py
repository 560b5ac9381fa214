"""Read files of requests, one on each line, and make the records that answer them.

A line is a prompt as text, or a request in the form of OpenAI's batch files:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}

The names in such a request come from OpenAI's batch and completion interfaces.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.base.files import without_bom
from mie.errors import RequestError

if TYPE_CHECKING:
    from mie.frontend.outputs import CompletionOutput, Logprob, LogprobRow, RequestOutput

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

_LABELS = ("user", "metadata", "store")  # for OpenAI's records; they do not change the answer


@dataclass(kw_only=True)
class Line:
    """A line of a file, or a prompt from elsewhere: its request, or why there is none."""

    source: str
    """Name in messages, such as "prompt 2" or "requests.jsonl, line 7"."""
    number: int | None = None
    ids: Mapping[str, Any] = field(default_factory=dict)
    """The ``custom_id`` of a line in OpenAI's batch form, with any value. The records repeat it."""
    url: Any = None
    """The interface that a line in OpenAI's batch form names."""
    is_batch: bool = False
    """Whether the line has OpenAI's batch form."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """One of a prompt, messages or token ids, with sampling parameters and labels."""
    error: str | None = None
    """Why the line has no request."""

    @property
    def title(self) -> str:
        """The request in one line."""
        if "messages" in self.request:
            return " ".join(str(self.request["messages"][-1].get("content", "")).split())
        if "prompt" in self.request:
            return " ".join(self.request["prompt"].split())
        return str(self.request["prompt_token_ids"])

    def records(self, output: RequestOutput | None, model: str) -> list[dict[str, Any]]:
        """Return a record for each choice, or a single one in OpenAI's batch form or of an error.

        A line with an ``error`` has no output.
        """
        number = {} if self.number is None else {"line": self.number}
        if output is None and self.is_batch:
            error = {"code": "invalid_request", "message": self.error}
            return [{**self.ids, "response": None, "error": error}]
        if output is None:
            return [{"line": self.number, "error": self.error}]
        if self.is_batch:
            return [{**_batch_record(output, model, self.url == CHAT_URL), **self.ids}]
        return [{**number, **_record(output, choice)} for choice in output.outputs]


def answer_all(
    lines: Mapping[str, Line],
    answers: Callable[[Mapping[str, Mapping[str, Any]]], Iterable[tuple[str, RequestOutput]]],
    write: Callable[[Line, RequestOutput | None], object],
    report: Callable[[str], object],
) -> None:
    """Write each line as it ends, with its output. Without one, its ``error`` is reported first.

    ``answers`` yields (key, output) of requests by their keys. It is not called without requests.
    """

    def end(line: Line, output: RequestOutput | None) -> None:
        if line.error is not None:
            report(line.error)
        write(line, output)

    for line in lines.values():
        if line.error is not None:
            end(line, None)
    requests = {key: line.request for key, line in lines.items() if line.error is None}
    for key, output in answers(requests) if requests else ():
        line = lines[key]
        if output.error is not None:
            line.error = f"{line.source}: {output.error}"
        end(line, None if line.error else output)


def num_failed(lines: Iterable[Line]) -> int:
    """Return the number of lines without a request, or with a failed request so far."""
    return sum(line.error is not None for line in lines)


# Reading.


def read_lines(path: str, model: str, *, is_batch: bool = False) -> Iterator[Line]:
    """Yield the lines of a file, where "-" is standard input.

    A line that begins with a brace has OpenAI's batch form, and any other line is a prompt. With
    ``is_batch`` every line must have OpenAI's batch form. A line in that form may name no other
    model than ``model``.
    """
    for number, source, raw in raw_lines(path):
        line = Line(source=source, number=number)
        line.is_batch = is_batch or raw.lstrip().startswith(b"{")
        try:
            if line.is_batch:
                line.request = values = json_object(raw, source)
                line.ids = {"custom_id": values.pop("custom_id")} if "custom_id" in values else {}
                line.request = _of_batch(line, values, model)
            else:
                line.request = {"prompt": decoded(raw, source)}
        except RequestError as error:
            line.error = str(error)
        yield line


def read_batch(path: str, model: str) -> dict[str, Line]:
    """Return the lines of a file in OpenAI's batch form by their custom_id.

    Raises:
        RequestError: a line is not JSON, or its custom_id is missing or used before.
    """
    lines: dict[str, Line] = {}
    for line in read_lines(path, model, is_batch=True):
        key = line.ids.get("custom_id")
        if not line.request and not line.ids:
            raise RequestError(str(line.error))
        if not isinstance(key, str) or not key:
            raise RequestError(f"{line.source} needs a custom_id, which is text; got {key!r}")
        if key in lines:
            first = lines[key].source
            raise RequestError(f"{line.source}: custom_id {key!r} is also that of {first}")
        lines[key] = line
    return lines


def raw_lines(path: str) -> Iterator[tuple[int, str, bytes]]:
    """Yield (number, name, bytes) of each line that is not blank, where "-" is standard input."""
    name = "standard input" if path == "-" else path
    try:
        content = Path(path).read_bytes() if path != "-" else _standard_input()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from error
    lines = without_bom(content).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, f"{name}, line {number}", line.rstrip(b"\r")


def _standard_input() -> bytes:
    return sys.stdin.buffer.read() if sys.stdin is not None else b""


def decoded(raw: bytes, source: str) -> str:
    """Return the text of a line, or raise `RequestError`."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source} is not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}"
        ) from error


def json_object(raw: bytes, source: str) -> dict[str, Any]:
    """Return the JSON object on a line, or raise `RequestError`."""
    text = decoded(raw, source)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
        raise RequestError(f"{source} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise RequestError(f"{source} must be a JSON object, got a {type(values).__name__}")
    return values


# OpenAI's batch form.


def _of_batch(line: Line, values: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the request in the values of a line in OpenAI's batch form.

    Raises:
        RequestError: the line is malformed, names another model, or has a parameter without effect
            here.
    """
    source = line.source
    unknown = values.keys() - {"method", "url", "body"}
    if unknown:
        raise RequestError(
            f"{source}: a line in OpenAI's batch form has no field {min(unknown)!r} (write it in"
            f' "body", beside "url": "{COMPLETIONS_URL}" or "{CHAT_URL}")'
        )
    method = values.get("method", "POST")
    if method != "POST":
        raise RequestError(f"{source}: method must be 'POST', got {method!r}")
    line.url, body = values.get("url"), values.get("body")
    if line.url not in (CHAT_URL, COMPLETIONS_URL):
        known = f"{CHAT_URL!r} or {COMPLETIONS_URL!r}"
        raise RequestError(f"{source}: url must be {known}, got {line.url!r}")
    if not isinstance(body, dict):
        raise RequestError(f"{source}: body must be a JSON object, got {body!r}")
    request = {name: value for name, value in body.items() if name not in _LABELS}
    asked = request.pop("model", model)
    if asked not in (model, Path(model).name):
        raise RequestError(
            f"{source}: model {asked!r} is not loaded; this run uses {model!r}"
            " (change the line, or --model)"
        )
    if request.pop("stream", False):
        raise RequestError(f"{source}: stream must be false in a batch")
    (_read_chat if line.url == CHAT_URL else _read_completion)(request, source)
    if isinstance(request.get("logit_bias"), dict):
        try:  # keys are text in JSON
            request["logit_bias"] = {int(key): bias for key, bias in request["logit_bias"].items()}
        except ValueError as error:
            raise RequestError(f"{source}: logit_bias: {error}") from error
    return {name: value for name, value in request.items() if value is not None}


def _read_chat(request: dict[str, Any], source: str) -> None:
    if "messages" not in request:
        raise RequestError(f"{source}: a body for {CHAT_URL} needs messages")
    if "max_completion_tokens" in request:
        request["max_tokens"] = request.pop("max_completion_tokens")
    wanted, num_top = request.pop("logprobs", None), request.pop("top_logprobs", None)
    if wanted not in (True, False, None):
        raise RequestError(f"{source}: logprobs must be true or false, got {wanted!r}")
    if num_top and not wanted:
        raise RequestError(f"{source}: top_logprobs needs logprobs to be true")
    if wanted:
        request["logprobs"] = num_top or 0


def _read_completion(request: dict[str, Any], source: str) -> None:
    if "prompt" not in request:
        raise RequestError(f"{source}: a body for {COMPLETIONS_URL} needs a prompt")
    if isinstance(request["prompt"], list):
        if not all(isinstance(token_id, int) for token_id in request["prompt"]):
            raise RequestError(
                f"{source}: a prompt is a text or token ids; give each text its own line"
            )
        request["prompt_token_ids"] = request.pop("prompt")


# Records.


def _record(output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
    """Return one choice as a JSON object with vLLM's names."""
    return {
        "request_id": output.request_id,
        "index": choice.index,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "text": choice.text,
        **({} if choice.reasoning is None else {"reasoning": choice.reasoning}),
        "token_ids": choice.token_ids,
        "cumulative_logprob": choice.cumulative_logprob,
        "logprobs": choice.logprobs
        and [
            [{"token_id": token_id, **asdict(entry)} for token_id, entry in row.items()]
            for row in choice.logprobs
        ],
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "metrics": output.metrics and output.metrics.as_dict(),
    }


def _batch_record(output: RequestOutput, model: str, is_chat: bool) -> dict[str, Any]:
    num_prompt = len(output.prompt_token_ids)
    num_output = sum(len(choice.token_ids) for choice in output.outputs)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{output.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(choice, is_chat) for choice in output.outputs],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
        },
    }
    response = {"status_code": 200, "request_id": output.request_id, "body": body}
    return {"id": f"batch_req_{output.request_id}", "response": response, "error": None}


def _choice(choice: CompletionOutput, is_chat: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": choice.text}
    if is_chat:
        reasoning = {} if choice.reasoning is None else {"reasoning": choice.reasoning}
        answer = {"message": {"role": "assistant", "content": choice.text, **reasoning}}
    logprobs_of = _chat_logprobs if is_chat else _text_logprobs
    return {
        "index": choice.index,
        **answer,
        "logprobs": choice.logprobs and logprobs_of(choice.logprobs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def _chat_logprobs(rows: list[LogprobRow]) -> dict[str, Any]:
    def entry_of(entry: Logprob) -> dict[str, Any]:
        token = entry.decoded_token or ""
        return {"token": token, "logprob": entry.logprob, "bytes": list(token.encode())}

    tops = [[entry_of(each) for each in row.values()] for row in rows]
    return {"content": [{**top[0], "top_logprobs": top} for top in tops]}


def _text_logprobs(rows: list[LogprobRow]) -> dict[str, Any]:
    chosen = [next(iter(row.values())) for row in rows]
    return {
        "tokens": [entry.decoded_token for entry in chosen],
        "token_logprobs": [entry.logprob for entry in chosen],
        "top_logprobs": [{e.decoded_token: e.logprob for e in row.values()} for row in rows],
    }
