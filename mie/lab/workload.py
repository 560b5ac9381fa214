"""Describe the requests to an engine and their times, as plain data that is the same in JSON.

A prompt consists of parts, so a file names texts without their words. A part is a
stretch of a named text, the answer to an earlier request, or a list of token ids.

Token ids stand for text, and only their equality matters. Each source of text (a stretch of a
prompt, an answer) has a key of 64 bits, and its tokens depend only on the key and their position.
So equal texts are equal, and others share no block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from mie.base.files import read_utf8
from mie.config.engine import check_integer, refuse_unknown
from mie.errors import ConfigError

T = TypeVar("T")

FORMAT_VERSION = 1
_MASK = (1 << 64) - 1
_TEXT = 1  # separates the texts of prompts from answers, which have keys of three numbers


TOKEN_FACTOR = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, as in SplitMix64."""


def text_key(*numbers: int) -> int:
    """Return a key for the source of text with these numbers (SplitMix64's finaliser for each)."""
    key = 0
    for number in numbers:
        key = (key ^ number) + TOKEN_FACTOR & _MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key


def text_token(key: int, position: int, vocab_size: int) -> int:
    """Return the token at a position.

    A factor of many bits for each position makes the tokens of a text independent. Otherwise short
    texts with different keys would be equal.
    """
    return (key * (position * TOKEN_FACTOR + 1) >> 32 & 0xFFFFFFFF) % vocab_size


@dataclass(frozen=True)
class Text:
    """The first ``length`` tokens of text number ``text``."""

    text: int
    length: int

    def __post_init__(self) -> None:
        check_integer("text", self.text, 0)
        check_integer("length", self.length, 1)


@dataclass(frozen=True)
class Tokens:
    """Tokens by their ids."""

    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        for token_id in self.token_ids:
            check_integer("token_ids", token_id, 0)


@dataclass(frozen=True)
class Answer:
    """The answer of a choice of an earlier request, as the engine generated it."""

    answer_of: str
    choice: int = 0

    def __post_init__(self) -> None:
        check_integer("choice", self.choice, 0)


Part: TypeAlias = Text | Tokens | Answer
_PARTS: Mapping[str, type[Part]] = {"text": Text, "token_ids": Tokens, "answer_of": Answer}

Answers: TypeAlias = Mapping[tuple[str, int], Sequence[int]]
"""Tokens by request and choice."""


@dataclass(frozen=True, kw_only=True)
class WorkloadRequest:
    """One request. It gets exactly ``max_tokens`` tokens, because nothing ends it earlier."""

    request_id: str
    prompt: tuple[Part, ...]
    max_tokens: int
    arrival_ns: int = 0
    """Time since the load began or, if there is an ``after``, since that request ended."""
    after: str | None = None
    n: int = 1
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("max_tokens", 1), ("arrival_ns", 0), ("n", 1)):
            check_integer(name, getattr(self, name), low)

    def token_ids(self, vocab_size: int, answers: Answers) -> list[int]:
        """Return the prompt for a model with that vocabulary."""
        return [
            token_id for part in self.prompt for token_id in _tokens_of(part, vocab_size, answers)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, for JSON."""
        values = {**vars(self), "prompt": [dict(vars(part)) for part in self.prompt]}
        return {
            name: value
            for name, value in values.items()
            if name not in _OPTIONAL or value != _OPTIONAL[name]
        }


_OPTIONAL: Mapping[str, Any] = {
    name: WorkloadRequest.__dataclass_fields__[name].default
    for name in ("after", "n", "priority", "cache_salt")
}


def _tokens_of(part: Part, vocab_size: int, answers: Answers) -> Sequence[int]:
    if isinstance(part, Text):
        key = text_key(_TEXT, part.text)
        return [text_token(key, position, vocab_size) for position in range(part.length)]
    if isinstance(part, Answer):
        return answers[part.answer_of, part.choice]
    return part.token_ids


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests in the order of a file, with checked dependencies.

    Raises:
        ConfigError: an id is used twice, or a request is after, or quotes, a request that has not
        ended by then.
    """

    name: str
    requests: tuple[WorkloadRequest, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was made, for readers of the file."""

    def __post_init__(self) -> None:
        ended_before: dict[str, frozenset[str]] = {}
        num_choices: dict[str, int] = {}
        for request in self.requests:
            name = f"request {request.request_id!r}"
            if request.request_id in ended_before:
                raise ConfigError(f"{name} is in the workload twice")
            if request.after is not None and request.after not in ended_before:
                raise ConfigError(f"{name} is after {request.after!r}, which is not before it")
            ended: frozenset[str] = frozenset()
            if request.after is not None:
                ended = ended_before[request.after] | {request.after}
            for part in request.prompt:
                if isinstance(part, Answer) and not (
                    part.answer_of in ended and part.choice < num_choices[part.answer_of]
                ):
                    raise ConfigError(
                        f"{name} quotes choice {part.choice} of {part.answer_of!r}, which has not "
                        "ended by then (name in 'after' that request, or one that comes after it)"
                    )
            ended_before[request.request_id] = ended
            num_choices[request.request_id] = request.n

    def to_json(self) -> str:
        """Return the file, with a line for each request."""
        encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
        head = {"format": FORMAT_VERSION, "name": self.name, "settings": dict(self.settings)}
        lines = ",\n".join(encode(request.as_dict()) for request in self.requests)
        return f'{encode(head)[:-1]},"requests":[\n{lines}\n]}}\n'

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the file."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Return the workload that `to_json` wrote.

        Raises:
            ConfigError: it is not a workload, or contradicts itself. The message names the request.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"not JSON: {error}") from error
        if not isinstance(values, dict) or values.get("format") != FORMAT_VERSION:
            raise ConfigError(f"not a workload of format {FORMAT_VERSION}")
        if not isinstance(values.get("requests"), list):
            raise ConfigError("a workload has a list of requests")
        return cls(
            name=str(values.get("name", "")),
            settings=values.get("settings", {}),
            requests=tuple(
                _located(f"request {index}", partial(_request, entry))
                for index, entry in enumerate(values["requests"])
            ),
        )

    @classmethod
    def load(cls, path: Path) -> Workload:
        """Load the workload in a file.

        Raises:
            ConfigError: the file cannot be read, or holds no workload.
        """
        try:
            text = read_utf8(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the workload {path}: {getattr(error, 'strerror', None) or error}"
            ) from error
        return _located(str(path), partial(cls.from_json, text))


def _located(where: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _request(values: Any) -> WorkloadRequest:
    if not isinstance(values, dict):
        raise ConfigError("not an object")
    refuse_unknown("a request", values, WorkloadRequest.__dataclass_fields__)
    for name in ("request_id", "prompt", "max_tokens"):
        if name not in values:
            raise ConfigError(f"a request has a {name}")
    if not isinstance(values["request_id"], str):
        raise ConfigError(f"request_id must be a string; got {values['request_id']!r}")
    if not isinstance(values["prompt"], list):
        raise ConfigError("prompt must be a list of parts")
    return WorkloadRequest(**{**values, "prompt": tuple(map(_part, values["prompt"]))})


def _part(values: Any) -> Part:
    for name, kind in _PARTS.items():
        if isinstance(values, dict) and name in values:
            refuse_unknown("a part of a prompt", values, kind.__dataclass_fields__)
            try:
                return kind(**values)
            except TypeError as error:
                raise ConfigError(f"a part of a prompt: {error}") from error
    raise ConfigError(f"a part of a prompt has one of {', '.join(_PARTS)}; got {values!r}")
