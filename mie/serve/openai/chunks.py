"""The common part of OpenAI's two generation routes: parameters, and answers whole or in chunks.

Chunks are written by hand, since they are most of the server's work for each token.
"""

import json
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from mie.config.params.sampling import SamplingParams
from mie.config.params.structured import StructuredOutputsParams
from mie.errors import ConfigError
from mie.frontend.outputs import RequestOutput
from mie.sched.result import TokenLogprobs
from mie.serve.asgi import DONE, json_string
from mie.serve.errors import ApiError, body_of, invalid
from mie.serve.openai.formats import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    StructuralTagFormat,
    closed_schema,
)
from mie.serve.openai.protocol import GenerationBody
from mie.serve.serving import Asked
from mie.serve.writer import Choice, Writer
from mie.serve.written import json_text

B = TypeVar("B", bound=GenerationBody, covariant=True)


class ChunkWriter(Writer[B]):
    """Writes choices. A dialect defines the form of their text."""

    last_delta: ClassVar[str | None] = None
    """The keys of a choice's last chunk, if that one has no text."""
    empty_delta: ClassVar[str]
    """The keys of a chunk without text."""
    has_new_tokens = True
    """Whether generated tokens are part of the answer."""

    def __init__(self, *, object: str, **asked: Any) -> None:
        super().__init__(**asked)
        body = self.body
        self.has_token_ids = self.keeps_tokens = bool(body.return_token_ids)
        self.sends_prompt_logprobs = body.prompt_logprobs is not None
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = self._usage_at_end and bool(options and options.continuous_usage_stats)
        self._object, self._created = object, int(time.time())
        self._tail = '], "usage": null}\n\n' if self._usage_at_end else "]}\n\n"
        self._cached: dict[int, int] = {}

    @cached_property
    def _fields(self) -> dict[str, Any]:
        """The first fields of an answer and of each chunk, once the prompts are prepared."""
        return {
            "id": self.response_id,
            "object": self._object,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.serving.digest_of(self.prepared[0].adapter)[:12]}",
        }

    @cached_property
    def _head(self) -> str:
        """The beginning of a chunk, up to the choices."""
        return "data: " + json.dumps(self._fields)[:-1] + ', "choices": ['

    @property
    def spelling(self) -> dict[str, bool]:
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return {"as_ids": as_ids, "skips_special": self.params.skip_special_tokens}

    # The dialect

    def first(self, choice: Choice) -> tuple[str, str] | None:
        """Return the keys and the extras of a chunk before the first text of a choice, if any."""

    @abstractmethod
    def deltas(self, choice: Choice) -> list[str]:
        """Return a choice's new output as keys of chunks."""

    @abstractmethod
    def logprobs_of(
        self, choice: Choice, token_ids: list[int], rows: Sequence[TokenLogprobs | None]
    ) -> Any:
        """Return the ``logprobs`` of tokens."""

    @abstractmethod
    def choice_of(self, choice: Choice) -> Any:
        """Return a choice of a whole answer."""

    def reason_of(self, choice: Choice) -> str | None:
        """Return why a choice ended."""
        return choice.new.finish_reason

    # A whole answer

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        outputs = self.finished
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return {
            **self._fields,
            "choices": [*map(self.choice_of, choices)],
            "usage": usage_of(num_prompt, sum(self._num_tokens), num_cached)
            | self.details(outputs),
            "metrics": metrics_of(outputs, self._num_tokens),
        }

    # A stream

    def open(self, choice: Choice) -> Iterator[str]:
        place = self.place(choice.request)
        self._cached[place] = choice.request.num_cached_tokens or 0
        if (first := self.first(choice)) is not None:
            yield self._chunk(choice, *first)

    def grow(self, choice: Choice) -> Iterator[str]:
        new = choice.new
        is_over = new.finish_reason is not None
        is_new = new.text or new.reasoning or new.tool_calls
        if not is_new and not is_over and not (self.has_token_ids and choice.token_ids):
            return  # half a character, or the beginning of a stop string or of a tag
        has_tokens = bool(choice.token_ids)
        extras = self._extras(choice) if self.keeps_tokens else ""
        if is_over and self.last_delta is not None and not has_tokens:
            extras = ""
        deltas = self.deltas(choice)
        if extras and not deltas:
            deltas.append(self.empty_delta)
        if is_over and self.last_delta is not None:
            deltas.append(self.last_delta)
        ending = "null"
        for place, keys in enumerate(deltas, start=1):
            if is_over and place == len(deltas):
                reason = json_string(self.reason_of(choice) or "")
                ending = f'{reason}, "stop_reason": {json.dumps(new.stop_reason)}'
            yield self._chunk(choice, keys, extras if place == 1 else "", ending)

    def _chunk(self, choice: Choice, keys: str, extras: str, reason: str = "null") -> str:
        extras = extras or ', "logprobs": null'
        written = f'{{"index": {choice.index}, {keys}{extras}, "finish_reason": {reason}}}'
        tail = self._tail
        if self._usage_always:
            tail = f'], "usage": {json.dumps(self._usage())}}}\n\n'
        return f"{self._head}{written}{tail}"

    def _extras(self, choice: Choice) -> str:
        """Return further keys of a choice, and drop the tokens that they report."""
        token_ids, rows = choice.take()
        if not self.has_new_tokens:
            return ""
        extras = ""
        if self.logprobs is not None:
            value = self.logprobs_of(choice, token_ids, rows) if token_ids else None
            extras = f', "logprobs": {json_text(value)}'
        if self.has_token_ids:
            extras += f', "token_ids": {token_ids}'
        return extras

    @property
    def _num_tokens(self) -> list[int]:
        """The number of tokens of each choice that the answer has."""
        return [each.num_tokens if self.has_new_tokens else 0 for each in self.choices.values()]

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(len(each.token_ids) for each in self.prepared)
        return usage_of(num_prompt, sum(self._num_tokens), sum(self._cached.values()))

    def end(self) -> str:
        if not self._usage_at_end:
            return DONE
        metrics = json.dumps(metrics_of(self.finished, self._num_tokens))
        usage = json.dumps(self._usage() | self.details(self.finished))
        return f'{self._head}], "usage": {usage}, "metrics": {metrics}}}\n\n{DONE}'

    def failure(self, error: ApiError) -> str:
        return f"data: {body_of(error, '')}\n\n{DONE}"


def usage_of(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    """Return OpenAI's ``usage``."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def metrics_of(
    outputs: Sequence[RequestOutput], num_tokens: Sequence[int]
) -> dict[str, Any] | None:
    """Return the times and counts of a request from the final outputs of its prompts.

    Times are of all prompts together: from the arrival to the first token of any, and so on.
    ``num_tokens`` has the number of tokens of each choice.
    """
    each = [output.metrics for output in outputs if output.metrics is not None]
    if not each:
        return None
    arrival = min(m.arrival_time for m in each)
    started = [m.first_step_time for m in each if m.first_step_time is not None]
    first = min((m.first_token_time for m in each if m.first_token_time is not None), default=None)
    last = max((m.last_token_time for m in each if m.last_token_time is not None), default=None)
    times: dict[str, Any] = {
        "queue_time_ms": _ms(max(started) - arrival) if started else None,
        "time_to_first_token_ms": None,
        "generation_time_ms": None,
        "mean_itl_ms": None,
        "tokens_per_second": None,
    }
    if first is not None and last is not None:
        times["time_to_first_token_ms"] = _ms(first - arrival)
        times["generation_time_ms"] = _ms(last - first)
        longest = max(num_tokens, default=0)
        if longest > 1:
            times["mean_itl_ms"] = _ms((last - first) / (longest - 1))
        if last > arrival:
            times["tokens_per_second"] = round(sum(num_tokens) / (last - arrival), 2)
    names = ("num_preemptions", "num_swaps", "num_recomputed_tokens", "num_copied_blocks")
    return {**times, **{name: sum(getattr(m, name) for m in each) for name in names}}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


_SAME = tuple(
    name
    for name in SamplingParams.__dataclass_fields__
    if name in GenerationBody.model_fields and name != "structured_outputs"
)
"""Fields that are sampling parameters of the same name and meaning."""


def set_params(asked: Asked[GenerationBody], **more: Any) -> None:
    """Set the sampling parameters of a request; see `Asked.set_params`.

    Raises:
        ApiError: a field is malformed or out of range, or two fields exclude each other.
        ConfigError: values contradict each other.
    """
    body = asked.body
    structure, structure_name = _structure_of(body)
    limit = asked.serving.facts.max_num_seqs
    if body.n is not None and body.n > limit:
        raise invalid(f"n is {body.n}; the server runs at most {limit} (--max-num-seqs)", "n")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs are not available with stream", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    values = {name: getattr(body, name) for name in _SAME}
    values |= {name: value for name, value in more.items() if value is not None}
    values["structured_outputs"] = structure
    asked.set_params(structure_name, body.stream, **values)


def _structure_of(body: GenerationBody) -> tuple[StructuredOutputsParams | None, str]:
    """Return the structure of the answer, and the name of the field that gives it."""
    given, form = body.structured_outputs, body.response_format
    structure = None
    if isinstance(form, JsonSchemaFormat):
        structure = schema_of(form.json_schema)
    elif isinstance(form, JsonObjectFormat):
        structure = schema_of(form)
    elif isinstance(form, StructuralTagFormat):
        structure = StructuredOutputsParams(
            structural_tag=form.known, disable_additional_properties=True
        )
    if given is None:
        return structure, "response_format"
    name = "structured_outputs"
    if structure is not None:
        raise invalid(f"response_format and {name} exclude each other; send one of them", name)
    try:
        return StructuredOutputsParams(**given.known), name
    except ConfigError as error:
        raise invalid(f"{name}: {str(error).removeprefix(f'{name} ')}", name) from error


def schema_of(given: NamedSchema | JsonObjectFormat) -> StructuredOutputsParams:
    """Return the JSON schema of a format, or the schema of any object."""
    if isinstance(given, NamedSchema):
        return closed_schema(given.schema_, given.strict)
    if given.schema_ is None:
        return StructuredOutputsParams(json_object=True)
    return closed_schema({"type": "object", **given.schema_})
