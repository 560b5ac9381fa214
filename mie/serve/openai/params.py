"""From the body of a generation request to sampling parameters."""

from __future__ import annotations

from typing import Any

from mie.config.params.sampling import SamplingParams
from mie.config.params.structured import StructuredOutputsParams
from mie.errors import ConfigError
from mie.serve.body import Asked
from mie.serve.errors import invalid
from mie.serve.openai.formats import JsonObjectFormat, JsonSchemaFormat, NamedSchema
from mie.serve.openai.protocol import GenerationBody

_SAME = tuple(
    name
    for name in SamplingParams.__dataclass_fields__
    if name in GenerationBody.model_fields and name != "structured_outputs"
)
"""Fields that are sampling parameters of the same name and meaning."""


def generation_params(
    asked: Asked[GenerationBody],
    *,
    has_tools: bool = False,
    fills_context: bool = False,
    **more: Any,
) -> tuple[SamplingParams, str]:
    """Return sampling parameters, and the name of the field that gives the answer's structure.

    If the answer ``fills_context``, the rest of the context is its default length.

    Raises:
        ApiError: a field is malformed or out of range, or two fields exclude each other.
        ConfigError: values contradict each other.
    """
    body, serving = asked.body, asked.serving
    structure, structure_name = _structure_of(body)
    if structure is not None and has_tools:
        message = f"{structure_name} and tools exclude each other, unless tool_choice is 'none'"
        raise invalid(message, structure_name)
    limit = serving.facts.max_num_seqs
    if body.n is not None and body.n > limit:
        raise invalid(f"n is {body.n}; the server runs at most {limit} (--max-num-seqs)", "n")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs are not available with stream", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    base = {"max_tokens": None, **serving.defaults} if fills_context else serving.defaults
    values = {name: getattr(body, name) for name in _SAME}
    values |= {name: value for name, value in more.items() if value is not None}
    values["structured_outputs"] = structure
    params = serving.params(structure_name, body.stream, base, **values)
    return params, structure_name


def _structure_of(body: GenerationBody) -> tuple[StructuredOutputsParams | None, str]:
    """Return the structure of the answer, and the name of the field that gives it."""
    given, form = body.structured_outputs, body.response_format
    structure = None
    if isinstance(form, JsonSchemaFormat):
        structure = schema_of(form.json_schema)
    elif isinstance(form, JsonObjectFormat):
        structure = schema_of(form)
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
    """Return the JSON schema of a format, or that of any object."""
    if isinstance(given, NamedSchema):
        return StructuredOutputsParams(json=given.schema_)
    if given.schema_ is None:
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json={"type": "object", **given.schema_})
