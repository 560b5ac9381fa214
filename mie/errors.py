"""Define every error that ``mie`` raises for something that a caller can cause::

    MieError
    ├── ConfigError                 a setting is out of range, unknown, or contradicts another
    │   └── TooLittleMemoryError    the request does not fit the memory; the message has a table
    ├── ModelError                  a model directory cannot be used
    │   ├── UnsupportedModelError   the model needs something that is not implemented
    │   ├── WeightsError            a weights file is broken or does not fit the configuration
    │   └── TokenizerError          the tokenizer is broken or does not fit the configuration
    ├── RequestError                one request cannot be served; the engine continues
    │   ├── RequestFailedError      the request failed while it ran
    │   ├── PromptTooLongError      the prompt leaves no room for an answer
    │   └── ChatTemplateError       the chat template is missing, raised, or did not end
    ├── EngineDeadError             the engine has failed, and its requests are lost
    ├── ThreadLimitError            the system refuses another thread
    ├── WorkerError                 a worker process cannot be started, ended, or did not answer
    ├── TraceError                  an event log cannot be read, or is impossible
    ├── MissingExtraError           an optional dependency is not installed
    ├── UnsupportedNameError        an attribute exists in vLLM only
    └── UnsupportedImportError      a name of a module exists in vLLM only

A message names the mistake, the given value, the limit, and the remedy. A bug in mie raises
``AssertionError``.
"""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_SHOWN = 80
"""Maximum number of characters of a value in a message."""


class MieError(Exception):
    """Base class of every error in this module."""


class ConfigError(MieError, ValueError):
    """A setting is out of range, unknown, or contradicts another."""


class TooLittleMemoryError(ConfigError):
    """The requested settings do not fit the memory. The message has a table and a remedy."""


class ModelError(MieError):
    """A model directory cannot be used."""


class UnsupportedModelError(ModelError):
    """The model needs an architecture or a feature that is not implemented."""


class WeightsError(ModelError):
    """A weights file is broken, or its tensors do not fit the configuration."""


class TokenizerError(ModelError):
    """The tokenizer is broken, or does not fit the configuration."""


class RequestError(MieError, ValueError):
    """One request cannot be served. The engine continues."""


class RequestFailedError(RequestError):
    """Requests failed while they ran. ``outputs`` has the outputs of all requests of the call."""

    def __init__(self, message: str, outputs: list[Any]) -> None:
        super().__init__(message)
        self.outputs = outputs


class PromptTooLongError(RequestError):
    """The prompt leaves no room for an answer. ``num_tokens`` is None before it is tokenized."""

    def __init__(self, message: str, num_tokens: int | None, max_model_len: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len


class ChatTemplateError(RequestError):
    """The chat template is missing, raised an error, or did not end in time."""


class EngineDeadError(MieError, RuntimeError):
    """The engine has failed, and its requests are lost. Load a new one."""


class ThreadLimitError(MieError, RuntimeError):
    """The system refuses another thread. Running requests go on."""


class WorkerError(MieError, RuntimeError):
    """A worker process cannot be started, ended on its own, or did not answer in time.

    The request is not to blame. It may be sent again.
    """


class TraceError(MieError):
    """An event log cannot be read, lacks a step, or contains impossible records."""


class MissingExtraError(MieError, ImportError):
    """An optional dependency is not installed. The message has the command that installs it."""


_SERVE = "starlette uvicorn httptools pydantic prometheus-client pyyaml"
EXTRAS = {
    "jit": "numba",
    "structured": "'llguidance<2'",
    "chat": "prompt_toolkit rich",
    "serve": _SERVE,
    "ray": f"'ray[serve]' pyarrow pandas {_SERVE}",
    "cuda12": "'cupy-cuda12x[ctk]'",
    "cuda13": "'cupy-cuda13x[ctk]'",
}
"""Maps an extra of mie to its packages, as arguments of ``pip install``.

Messages name the packages, because the name ``mie`` on a package index may be a stranger's.
"""


def install_command(extra: str, option: str = "") -> str:
    """Return the command that installs the packages of an extra, with an option of pip."""
    return " ".join(filter(None, ("pip install", option, EXTRAS[extra])))


@contextmanager
def needing_extra(extra: str, name: str) -> Iterator[None]:
    """Return a context for imports of packages that ``extra`` installs.

    ``name`` is the command, option or module that needs them.

    Raises:
        MissingExtraError: a package is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            f"{name} needs the package {error.name} (install it with: {install_command(extra)})"
        ) from error


class UnsupportedNameError(MieError, AttributeError):
    """An attribute exists in vLLM only. The message has the remedy."""


class UnsupportedImportError(MieError, ImportError):
    """A name of a module exists in vLLM only. The message has the remedy."""


def shown(value: object) -> str:
    """Return the value for a message, escaped like a Python literal and at most a line long."""
    try:
        text = _BRIEF.repr(value)
    except ValueError:  # An integer of more than 4,300 digits.
        return f"an object of type {type(value).__name__} that cannot be printed"
    text = " ".join(text.split())  # Arrays take several lines.
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def shown_text(value: object) -> str:
    """Return short, printable text unchanged, and any other value as `shown` does."""
    is_plain = isinstance(value, str) and len(value) <= MAX_SHOWN and value.isprintable()
    return str(value) if is_plain else shown(value)


def printable(text: str, longest: int = 1000) -> str:
    """Return text of unknown origin with control characters escaped, cut where it is too long."""
    cut = text if len(text) <= longest else text[:longest] + "…"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )


def _brief() -> reprlib.Repr:
    brief = reprlib.Repr()
    brief.maxlevel = 3  # the whole of a deeply nested value may exceed the recursion limit
    brief.maxlist = brief.maxdict = brief.maxtuple = 20
    brief.maxstring = brief.maxlong = brief.maxother = 2 * MAX_SHOWN
    return brief


_BRIEF = _brief()
