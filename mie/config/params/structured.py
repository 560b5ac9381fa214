"""Describe the text that an output must match, with vLLM's names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mie.base.refusals import refuses_names
from mie.config.engine import RequestLimits, check_switch, keyword_checked
from mie.config.params import values
from mie.errors import ConfigError, shown, shown_text

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_JSON = ("json", "json_object", "structural_tag")
JSON_OPTIONS: Mapping[str, tuple[Any, Sequence[str]]] = {
    "disable_any_whitespace": (True, _JSON),
    "disable_additional_properties": (False, (*_JSON, "grammar")),
    "whitespace_pattern": (None, _JSON),
}
"""The default of each option, and the kinds of descriptions that it belongs to."""
_MAX_CHOICES = 2**16

COMPACT: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
}
"""Options of llguidance for JSON without whitespace."""


@refuses_names
@keyword_checked
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Describes the text that an output must be: exactly one description is given.

    The names are vLLM's. Values are checked and converted to plain ones when the object is created,
    and cannot be assigned later. A bad value or an unknown name raises `ConfigError`. The grammar
    itself is checked when a request is prepared.

    json: A JSON schema, as a dictionary, a boolean or as text. The output is a JSON value that it
        accepts. Default: None.
    regex: A regular expression in Rust's syntax. The whole output matches it. Default: None.
    choice: Texts that the output is chosen from; a list of strings. Default: None.
    grammar: A grammar in llguidance's dialect of Lark with a rule ``start``, or in EBNF (GBNF) with
        a rule ``root``. Default: None.
    json_object: True for any JSON object. Default: None.
    disable_any_whitespace: Write JSON without whitespace. With False the model may write any (in
        vLLM the default is False). Default: True.
    disable_additional_properties: Allow only the properties that a schema names, where it does not
        have ``additionalProperties``. This also applies to the schemas of a grammar.
        Default: False.
    whitespace_pattern: A regular expression for the whitespace between the tokens of JSON. It
        replaces ``disable_any_whitespace``. Default: None.
    structural_tag: A tree of formats that mixes free text and constrained regions, in one of
        XGrammar's two forms, as a dictionary or as text. Default: None.
    """

    json: str | bool | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = True
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None:
            check_switch("json_object", self.json_object)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check_switch(name, getattr(self, name))
        if self.json is not None:
            object.__setattr__(self, "json", _json_text("json", "a JSON schema", self.json))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise ConfigError(f"structured_outputs needs one of {', '.join(KINDS)}; got {got}")
        self._refuse_json_options(given[0])
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} must be a string; got {shown(value)}")
            if value is not None:
                _check_encodes(name, value)
        if self.grammar == "":
            raise ConfigError("grammar is empty; it needs a rule named start")
        if self.structural_tag is not None:
            tag = _json_text("structural_tag", "a structural tag", self.structural_tag)
            object.__setattr__(self, "structural_tag", tag)
        if self.choice is not None:
            choices = values.strings("choice", self.choice, _MAX_CHOICES, _MAX_CHOICES)
            if not choices:
                raise ConfigError("choice must have at least one text; got none")
            _check_encodes("choice", "".join(choices))
            object.__setattr__(self, "choice", choices)

    @property
    def num_chars(self) -> int:
        """The number of characters that describe the output."""
        texts = (self.json, self.regex, self.grammar, self.whitespace_pattern, self.structural_tag)
        given = (*texts, *(self.choice or ()))
        return sum(len(text) for text in given if isinstance(text, str))

    def _refuse_json_options(self, kind: str) -> None:
        for name, (default, kinds) in JSON_OPTIONS.items():
            if kind not in kinds and getattr(self, name) != default:
                raise ConfigError(f"{name} belongs to {' and '.join(kinds)}; got it with {kind}")


def structure_from(given: object, limits: RequestLimits) -> StructuredOutputsParams | None:
    """Return the parameters from a mapping of their fields, or unchanged.

    Raises:
        ConfigError: they are neither, or too long.
    """
    if isinstance(given, Mapping):
        given = StructuredOutputsParams(**{shown_text(name): given[name] for name in given})
    if given is None:
        return None
    if not isinstance(given, StructuredOutputsParams):
        raise ConfigError(f"structured_outputs must be StructuredOutputsParams; got {shown(given)}")
    if given.num_chars > limits.max_grammar_chars:
        limit = limits.max_grammar_chars
        raise ConfigError(
            f"structured_outputs may have at most {limit} characters; got {given.num_chars}"
        )
    return given


def _check_encodes(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        number = ord(text[error.start])
        raise ConfigError(
            f"structured_outputs has a {name} with an unpaired surrogate, U+{number:04X}"
        ) from error


def _json_text(name: str, what: str, value: object) -> str:
    """Return an object as JSON text, with its keys in their order."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        is_schema = name == "json"
        if is_schema and isinstance(found, bool):
            found = {} if found else {"not": {}}
        if not isinstance(found, Mapping):
            kinds = "an object or a boolean" if is_schema else "an object"
            raise ConfigError(f"{name} must be {what}, {kinds}; got {shown(found)}")
        return json.dumps(dict(found), allow_nan=False)
    except RecursionError as error:
        raise ConfigError(f"{name} must be {what}: it nests too deep") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{name} must be {what}: {error}") from error
