"""What an answer must be: ``response_format``, and vLLM's ``structured_outputs``."""

from __future__ import annotations

from mie.errors import ConfigError
from mie.params.structured import StructuredOutputsParams
from mie.serve.errors import invalid
from mie.serve.openai.formats import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    TextFormat,
)
from mie.serve.openai.protocol import GenerationBody


def structure_of(body: GenerationBody) -> tuple[StructuredOutputsParams | None, str]:
    """Return what the answer must be, and the name of the field that says so.

    Raises:
        ApiError: a field is malformed, or both are given.
    """
    given, structure = body.structured_outputs, format_of(body.response_format)
    if given is None:
        return structure, "response_format"
    name = "structured_outputs"
    if structure is not None:
        raise invalid(f"response_format and {name} exclude each other; send one of them", name)
    try:
        return StructuredOutputsParams(**given.known), name
    except ConfigError as error:
        raise invalid(f"{name}: {str(error).removeprefix(f'{name} ')}", name) from error


def format_of(
    given: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
) -> StructuredOutputsParams | None:
    """Return what a format of a chat says, or None for text."""
    if isinstance(given, JsonSchemaFormat):
        return schema_of(given.json_schema)
    return schema_of(given) if isinstance(given, JsonObjectFormat) else None


def schema_of(given: NamedSchema | JsonObjectFormat) -> StructuredOutputsParams:
    """Return the JSON schema of a format, or that of any object."""
    if isinstance(given, NamedSchema):
        return StructuredOutputsParams(json=given.schema_)
    if given.schema_ is None:
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json={"type": "object", **given.schema_})
