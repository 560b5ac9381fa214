"""Every error that ``mie`` raises for something a caller can cause.

    MieError
    ├── ConfigError                 a setting is out of range, unknown, or contradicts another
    │   └── TooLittleMemoryError    what was asked for does not fit; with a table of it
    ├── ModelError                  a model directory cannot be used
    │   ├── UnsupportedModelError   it asks for something that is not implemented
    │   ├── WeightsError            a weights file is broken or does not fit the configuration
    │   └── TokenizerError          the tokenizer is broken or does not fit the configuration
    ├── RequestError                one request cannot be served; the engine goes on
    │   ├── RequestFailedError      it failed while it ran, because of an error of its own
    │   └── ChatTemplateError       the chat template is missing, raised, or did not end
    ├── EngineDeadError             the engine cannot go on; every request it had is lost
    ├── TraceError                  an event log cannot be read, or tells what cannot have been
    └── MissingExtraError           an optional dependency is not installed

A message says what, got, limit and remedy. Our own broken promises are ``AssertionError``.
"""

import reprlib
from typing import Any

MAX_SHOWN = 80
"""Characters of a value in a message."""


class MieError(Exception):
    """Base class of every error in this module."""


class ConfigError(MieError, ValueError):
    """A setting is out of range, unknown, or contradicts another."""


class TooLittleMemoryError(ConfigError):
    """What was asked for does not fit the memory. The message has lines: a table, and a remedy."""


class ModelError(MieError):
    """A model directory cannot be used."""


class UnsupportedModelError(ModelError):
    """The model asks for an architecture or a feature that is not implemented."""


class WeightsError(ModelError):
    """A weights file is broken, or its tensors do not fit the configuration."""


class TokenizerError(ModelError):
    """The tokenizer is broken, or does not fit the configuration."""


class RequestError(MieError, ValueError):
    """One request cannot be served; the engine goes on."""


class RequestFailedError(RequestError):
    """Requests failed while they ran; ``outputs`` has what all requests of the call gave."""

    def __init__(self, message: str, outputs: list[Any]) -> None:
        super().__init__(message)
        self.outputs = outputs


class ChatTemplateError(RequestError):
    """The chat template is missing, raised an error, or did not end in time."""


class EngineDeadError(MieError, RuntimeError):
    """The engine cannot go on, and every request that it had is lost. Load a new one."""


class TraceError(MieError):
    """An event log cannot be read, has no such step, or tells what cannot have happened."""


class MissingExtraError(MieError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


def shown(value: object) -> str:
    """The value as messages show it: escaped like a Python literal, and not longer than a line."""
    try:
        text = _BRIEF.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"an object of type {type(value).__name__} that cannot be printed"
    text = " ".join(text.split())  # arrays are written in lines
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def shown_text(value: object) -> str:
    """Short, printable text as it is; anything else as `shown` has it."""
    is_plain = isinstance(value, str) and len(value) <= MAX_SHOWN and value.isprintable()
    return str(value) if is_plain else shown(value)


def _brief() -> reprlib.Repr:
    brief = reprlib.Repr()
    brief.maxlevel = 3  # the whole of a deeply nested value may exceed the recursion limit
    brief.maxlist = brief.maxdict = brief.maxtuple = 20
    brief.maxstring = brief.maxlong = brief.maxother = 2 * MAX_SHOWN
    return brief


_BRIEF = _brief()
