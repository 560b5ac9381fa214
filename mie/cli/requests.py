"""Read the requests of ``mie generate`` from arguments, standard input, or JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mie.cli.openai_batch import BatchLine, is_batch_line
from mie.errors import RequestError

_KINDS: Mapping[str, type[Any]] = {"prompt": str, "messages": list, "prompt_token_ids": list}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The source of a request, and what its record in the output repeats."""

    source: str
    """Name in messages, such as "prompt 2" or "requests.jsonl, line 7"."""
    line: int | None = None
    """Number of the JSON line."""
    ids: Mapping[str, Any] = field(default_factory=dict)
    """The line's ``id`` and ``custom_id``, with any value."""
    batch: BatchLine | None = None
    """The line in OpenAI's batch form, or None if it has another form."""


@dataclass(frozen=True, kw_only=True)
class RefusedRequest:
    """A line that cannot be served, and the reason."""

    origin: Origin
    error: str


@dataclass(frozen=True, kw_only=True)
class CliRequest:
    """A request with one of a prompt, messages or token ids."""

    origin: Origin
    prompt: str | None = None
    messages: Sequence[Any] | None = None
    prompt_token_ids: Sequence[int] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters
    labels: Mapping[str, Any] = field(default_factory=dict)  # priority, cache_salt

    @property
    def title(self) -> str:
        """The request in one line."""
        if self.prompt is not None:
            return " ".join(self.prompt.split())
        if self.messages is not None:
            return " ".join(str(self.messages[-1].get("content", "")).split())
        return str(self.prompt_token_ids)


def from_prompts(prompts: Sequence[str], *, system: str | None, chat: bool) -> list[CliRequest]:
    """Return a request for each prompt.

    With ``chat`` the prompt is a user's message, after the ``system`` message if there is one.
    """
    return [
        _from_prompt(prompt, f"prompt {number}", system=system, chat=chat)
        for number, prompt in enumerate(prompts, start=1)
    ]


def _from_prompt(prompt: str, source: str, *, system: str | None, chat: bool) -> CliRequest:
    if not prompt:
        raise RequestError(f"{source} is empty; give it some text")
    if not chat:
        return CliRequest(origin=Origin(source=source), prompt=prompt)
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = [*opening, {"role": "user", "content": prompt}]
    return CliRequest(origin=Origin(source=source), messages=messages)


def prompts_from_stdin() -> list[str]:
    """Return the lines of standard input that are not blank, as prompts.

    Raises:
        RequestError: a line is not UTF-8, or there are no lines.
    """
    lines = [_decoded(raw, f"standard input, line {i}") for i, raw in lines_of("-")]
    if not lines:
        raise RequestError(
            "no prompt: standard input is empty; pass prompts as arguments, one per line on"
            " standard input, or as JSON lines with --input"
        )
    return lines


def from_json_lines(path: str, model: str) -> Iterator[CliRequest | RefusedRequest]:
    """Yield a request or an error for each line of ``path``, where "-" is standard input.

    ``model`` is the loaded model. A line in OpenAI's batch form may not name another.
    """
    name = "standard input" if path == "-" else path
    for number, raw in lines_of(path):
        origin = Origin(source=f"{name}, line {number}", line=number)
        try:
            values = json_object(raw, origin.source)
            origin = replace(origin, ids=_taken(values, "id", "custom_id"))
            if is_batch_line(values):
                batch = BatchLine(values=values, source=origin.source)
                origin = replace(origin, batch=batch)
                values = batch.request(model)
            yield _from_values(values, origin)
        except RequestError as error:
            yield RefusedRequest(origin=origin, error=str(error))


def lines_of(path: str) -> Iterator[tuple[int, bytes]]:
    """Return the lines that are not blank, numbered from 1. "-" is standard input."""
    lines = _read(path).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return ((i, line.rstrip(b"\r")) for i, line in enumerate(lines, start=1) if line.strip())


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read() if sys.stdin is not None else b""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from error


def _decoded(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source} is not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}"
        ) from error


def json_object(raw: bytes, source: str) -> dict[str, Any]:
    """Return the JSON object on a line, or raise `RequestError`."""
    text = _decoded(raw, source)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
        raise RequestError(f"{source} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise RequestError(f"{source} must be a JSON object, got a {type(values).__name__}")
    return values


def _from_values(values: dict[str, Any], origin: Origin) -> CliRequest:
    source = origin.source
    given = _taken(values, *_KINDS)
    labels = _taken(values, "priority", "cache_salt")
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise RequestError(f"{source} needs one of {', '.join(_KINDS)}; got {got}")
    ((name, value),) = given.items()
    if not isinstance(value, _KINDS[name]):
        kind = "a string" if _KINDS[name] is str else "a list"
        raise RequestError(f"{source}: {name} must be {kind}, got {value!r}")
    if not value:
        raise RequestError(f"{source}: {name} is empty")
    return CliRequest(origin=origin, overrides=values, labels=labels, **given)


def _taken(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """Remove the named values from ``values`` and return them."""
    return {name: values.pop(name) for name in names if name in values}
