"""From the JSON body of a request to what the engine runs; nothing in it is silently ignored.

A field is one of four kinds:

* Declared in `mie.serve.openai.protocol`: it has an effect.
* Unsupported, in `mie.serve.openai.fields`: a value that changes nothing is accepted, and any other
  is refused by name.
* Without effect, in the same table: clients send it for their own or their provider's records.
* Unknown: named in the header ``x-mie-ignored`` and once in the log, or refused with ``--strict``.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from mie.errors import shown
from mie.params.sampling import RequestOutputKind, SamplingParams
from mie.serve.asgi import route_of
from mie.serve.errors import ApiError, invalid, naming_structure, not_json, unsupported
from mie.serve.openai.fields import OPENAI, Fields
from mie.serve.openai.protocol import Body, ChatCompletionRequest, CompletionRequest, GenerationBody
from mie.serve.serving import Job, Serving

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Body)

MAX_FIELDS = 1000
"""Fields of a body. Clients know about a hundred."""

ENGINE_PARAMS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "skip_reading_prefix_cache",
)
"""Fields that are sampling parameters of the same name and meaning."""


def parse(body: bytes, cls: type[B]) -> B:
    """Return the body of a request, checked.

    Raises:
        ApiError: it is not a JSON object, or a field is missing or wrong.
    """
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise not_json(error) from error
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise invalid(f"the body must be a JSON object; got {kind}", code="invalid_json")
    if len(values) > MAX_FIELDS:
        raise invalid(f"the body has {len(values)} fields; the limit is {MAX_FIELDS}")
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise _validation_error(error) from error


def ignored_fields(
    body: Body, serving: Serving, path: str, fields: Fields = OPENAI
) -> dict[str, str]:
    """Judge the fields that are not declared, and return headers that name the ignored ones.

    Raises:
        ApiError: a field is not supported, or is unknown under ``--strict``.
    """
    unknown = []
    options = getattr(body, "stream_options", None)
    nested = {} if options is None else options.model_extra
    for name, value in {**(body.model_extra or {}), **nested}.items():
        if name in fields.unsupported:
            neutral, why = fields.unsupported[name]
            if not any(type(value) is type(each) and value == each for each in neutral):
                raise unsupported(name, f"{why} (leave it out); got {shown(value)}")
        elif name not in fields.without_effect:
            unknown.append(name)
    if not unknown:
        return {}
    names = ",".join(map(_header_safe, unknown[:20]))
    if serving.config.strict:
        message = f"unknown fields: {names} (the server runs with --strict)"
        raise ApiError(400, message, code="unknown_parameter", param=_header_safe(unknown[0]))
    if serving.is_first_report(names):
        logger.warning("POST %s: ignored unknown fields: %s", path, names)
    return {"x-mie-ignored": names}


def sampling_params(
    body: GenerationBody, serving: Serving, structure_name: str, **more: Any
) -> SamplingParams:
    """Return the sampling parameters of a request over the server's defaults.

    ``structure_name`` is the field that says what the answer must be.

    Raises:
        ApiError: a value is out of range.
        ConfigError: values contradict each other.
    """
    values = {**serving.defaults}
    for name in ENGINE_PARAMS:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    if body.logit_bias is not None:
        values["logit_bias"] = _biases(body.logit_bias)
    values |= {name: value for name, value in more.items() if value is not None}
    limit = serving.facts.max_num_seqs
    if values.get("n", 1) > limit:
        raise invalid(f"n is {values['n']}; the server runs at most {limit} (--max-num-seqs)", "n")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs are not available with stream", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    with naming_structure(structure_name):
        return SamplingParams(**values, output_kind=kind)


def job_of(
    body: GenerationBody,
    response_id: str,
    prompts: list[Any],
    params: SamplingParams,
    *,
    is_max_tokens_given: bool,
    adds_special_tokens: bool = True,
    structure_name: str = "structured_outputs",
    logprobs_name: str = "logprobs",
) -> Job:
    """Return what the engine is asked for."""
    return Job(
        response_id=response_id,
        prompts=prompts,
        params=params,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        is_max_tokens_given=is_max_tokens_given,
        adds_special_tokens=adds_special_tokens,
        structure_name=structure_name,
        logprobs_name=logprobs_name,
    )


def wants_usage(body: GenerationBody) -> tuple[bool, bool]:
    """Return whether a stream ends with the usage, and whether every chunk has it."""
    options = body.stream_options
    if options is None:
        return False, False
    return bool(options.include_usage), bool(
        options.include_usage and options.continuous_usage_stats
    )


def _biases(given: object) -> dict[int, float]:
    if not isinstance(given, dict):
        raise invalid(f"logit_bias must be an object; got {shown(given)}", "logit_bias")
    biases = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 18:
            raise invalid(f"logit_bias must have token ids as keys; got {shown(key)}", "logit_bias")
        if type(value) not in (int, float) or not -100 <= value <= 100:
            message = f"logit_bias must be -100 … 100; got {shown(value)} for token {key}"
            raise invalid(message, "logit_bias")
        biases[int(key)] = value
    return biases


def _validation_error(error: ValidationError) -> ApiError:
    """Return the 400 for one wrong field; of a union, the alternative that came furthest."""
    all_errors = error.errors(include_url=False, include_context=False)
    of_field = [each for each in all_errors if each["loc"][:1] == all_errors[0]["loc"][:1]]
    first = max(of_field, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    place = [str(each) for each in first["loc"]]
    # The parts of a union's places are names of types, which no client knows.
    path = ".".join(each for each in place if each.isidentifier() or each.isdigit())
    if first["type"] == "missing":
        return ApiError(400, f"{path} is missing", code="missing_required_parameter", param=path)
    message = f"{path}: {first['msg']}; got {shown(first['input'])}"
    return invalid(message, place[0] if place else None)


def _header_safe(name: str) -> str:
    plain = name if name.isascii() and name.isprintable() else ascii(name)
    return plain.replace(",", "_")[:64]


async def read(
    request: Request, serving: Serving, cls: type[CompletionRequest] | type[ChatCompletionRequest]
) -> tuple[Any, str, dict[str, str]]:
    """Return a request's body, the name of the model that it asks, and headers for the answer."""
    body = parse(await request.body(), cls)
    model = serving.check_model(body.model)
    return body, model, ignored_fields(body, serving, route_of(request.scope))
