"""The structure of an answer: ``response_format``, and vLLM's ``structured_outputs``."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mie.config.params.structured import StructuredOutputsParams
from mie.serve.body import ABSENT, OFF, SOME, TEXT, AtMost, Body, Items, all_of, any_of

MAX_CHOICES = 2**16

Text = Annotated[str, Field(min_length=1)]
Schema = dict[str, Any]
"""A JSON schema."""


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """A JSON object. llama.cpp's field ``schema`` may give its schema."""

    type: Literal["json_object"]
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


class NamedSchema(Body):
    """A JSON schema. It always holds. Objects are closed unless ``strict`` is false."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagFormat(Body):
    """A structural tag (XGrammar), in the older form with triggers or in the newer one."""

    model_config = all_of(
        any_of({"format": {"type": "object"}}, {"structures": SOME, "triggers": SOME})
    )

    type: Literal["structural_tag"]
    format: Schema | None = None
    structures: Annotated[Items[Schema], AtMost(MAX_CHOICES)] | None = None
    triggers: Annotated[Items[Text], AtMost(MAX_CHOICES)] | None = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat,
    Field(discriminator="type"),
]

_KINDS = {
    "json": {"type": ["string", "object"]},
    "json_object": {"const": True},
    "regex": TEXT,
    "choice": SOME,
    "grammar": TEXT,
    "structural_tag": {"type": ["string", "object"]},
}
_JSON_OPTIONS = {
    "disable_any_whitespace": OFF,
    "disable_additional_properties": OFF,
    "whitespace_pattern": ABSENT,
}


def _kind_of_structure(name: str) -> dict[str, Any]:
    """Return the schema of the fields if ``name`` gives the structure."""
    others = {each: OFF if each == "json_object" else ABSENT for each in _KINDS if each != name}
    options = {} if name in ("json", "json_object", "structural_tag") else dict(_JSON_OPTIONS)
    if name == "grammar":
        del options["disable_additional_properties"]
    return {name: _KINDS[name], **others, **options}


class StructuredOutputs(Body):
    """The constraint of an answer, as in `StructuredOutputsParams` (vLLM)."""

    model_config = all_of(any_of(*map(_kind_of_structure, _KINDS)))

    json_: Annotated[str | Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[Items[Text], Field(min_length=1), AtMost(MAX_CHOICES)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | Schema | None = None


def closed_schema(schema: Mapping[str, Any], strict: bool | None = None) -> StructuredOutputsParams:
    """Return a JSON schema. Objects have only the named properties, unless strict is false."""
    return StructuredOutputsParams(json=schema, disable_additional_properties=strict is not False)
