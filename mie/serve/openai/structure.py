"""What an answer must be: ``response_format``, and vLLM's ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mie.errors import ConfigError, shown
from mie.params.structured import StructuredOutputsParams
from mie.serve.errors import invalid, unsupported
from mie.serve.openai.protocol import GenerationBody

KEYS = {"name", "description", "schema", "strict"}
"""What a format with a schema may have. The schema always holds, whether it is ``strict``."""


def structure_of(body: GenerationBody) -> tuple[StructuredOutputsParams | None, str]:
    """Return what the answer must be, and the name of the field that says so.

    Raises:
        ApiError: a field is malformed, or both are given.
    """
    given = body.structured_outputs
    structure = format_of(body.response_format, "response_format")
    if given is None:
        return structure, "response_format"
    name = "structured_outputs"
    if structure is not None:
        raise invalid(f"response_format and {name} exclude each other; send one of them", name)
    try:
        return StructuredOutputsParams(**given), name
    except ConfigError as error:
        raise invalid(f"{name}: {str(error).removeprefix(f'{name} ')}", name) from error


def format_of(given: object, name: str) -> StructuredOutputsParams | None:
    """Return what a format of OpenAI says, or None for text.

    Raises:
        ApiError: it is malformed or not supported.
    """
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        kinds = "'text', 'json_object' or 'json_schema'"
        raise invalid(f"{name}.type must be {kinds}; got {shown(kind)}", name)
    assert isinstance(given, Mapping)
    return schema_of(given.get("json_schema"), f"{name}.json_schema", name)


def schema_of(given: object, where: str, name: str) -> StructuredOutputsParams:
    """Return the schema in a format.

    Raises:
        ApiError: there is none, or the format has an unknown key.
    """
    if not isinstance(given, Mapping):
        raise invalid(f"{where} must be an object; got {shown(given)}", name)
    for key, value in given.items():
        if key not in KEYS and value is not None:
            raise unsupported(f"{where}.{key}", f"leave it out; got {shown(value)}")
    schema: Any = given.get("schema")
    if not isinstance(schema, Mapping):
        raise invalid(f"{where}.schema must be a JSON schema; got {shown(schema)}", name)
    try:
        return StructuredOutputsParams(json=schema)
    except ConfigError as error:
        raise invalid(f"{where}.schema: {error}", name) from error
