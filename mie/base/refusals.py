"""Accept the arguments of vLLM that have no effect in mie, and refuse its other names.

A refusal has the closest name of mie, if one is close, and the remedy of the group in
`mie.base.vllm_names`.
"""

import difflib
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

from mie.base import vllm_names
from mie.errors import ConfigError, UnsupportedImportError, UnsupportedNameError, shown

T = TypeVar("T")

ANYTHING = "*"


class Neutral(NamedTuple):
    """The values of an argument that have no effect."""

    values: tuple[Any, ...]
    """The values, of which the first one is the default."""
    may_be_any: bool
    """Whether every other value has no effect either."""
    remedy: str
    """How to get the effect of another value."""

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` unless ``value`` has no effect. A list, a tuple and a set are equal.

        ``name`` is the argument.
        """
        if not self.may_be_any and not any(_is_equal(value, each) for each in self.values):
            allowed = " or ".join(map(repr, self.values))
            raise ConfigError(
                f"{name} is not supported: {self.remedy} (leave it at {allowed}); "
                f"got {shown(value)}"
            )


def _is_equal(value: object, neutral: object) -> bool:
    if isinstance(value, (tuple, set)):
        value = list(value)
    are_numbers = _is_number(value) and _is_number(neutral)  # an int and a float may be equal
    return (are_numbers or type(value) is type(neutral)) and value == neutral


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_CONSTANTS: Mapping[str, Any] = MappingProxyType({"None": None, "False": False, "True": True})


def _value(text: str) -> Any:
    """Return the value of a Python constant or of JSON, or the text if it is neither."""
    try:
        return _CONSTANTS[text] if text in _CONSTANTS else json.loads(text)
    except ValueError:
        return text


def _entries(tables: Mapping[str, Mapping[str, str]], owner: str) -> Iterator[tuple[str, str]]:
    """Yield each entry of an owner with its remedy."""
    for owners, remedies in tables.items():
        if owner in owners.split():
            for remedy, entries in remedies.items():
                yield from ((entry, remedy) for entry in entries.split())


def _neutral(entries: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Neutral]]:
    for entry, remedy in entries:
        name, _, values = entry.partition("=")
        texts = values.split("|")
        allowed = tuple(_value(text) for text in texts if text != ANYTHING)
        yield name, Neutral(allowed, ANYTHING in texts, remedy)


NEUTRAL: Mapping[str, Mapping[str, Neutral]] = MappingProxyType(
    {
        owner: MappingProxyType(dict(_neutral(_entries(vllm_names.NEUTRAL, owner))))
        for owners in vllm_names.NEUTRAL
        for owner in owners.split()
    }
)
"""The arguments without effect of a class, or of "calls"."""

REFUSED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        owner: MappingProxyType(dict(_entries(vllm_names.REFUSED, owner)))
        for owners in vllm_names.REFUSED
        for owner in owners.split()
    }
)
"""The remedy of each name that is refused in a class, or of a kind of names."""


def refusal(owner: str, name: str, remedy: str, known: Iterable[str]) -> str:
    """Return the message for a name that ``owner`` lacks. ``known`` are the names that it has."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    hint = f" (the closest name is {near[0]!r})" if near and near[0] not in remedy else ""
    return f"{owner} has no {name}: {remedy}{hint}"


# Names of classes.


def refuses_names(cls: type[T]) -> type[T]:
    """Decorate a class so that each of vLLM's names that it lacks is refused with the remedy.

    Reading one raises `UnsupportedNameError`, an ``AttributeError``, so that ``hasattr`` is False.
    """
    fields = getattr(cls, "__dataclass_fields__", ())  # a field without a default is no attribute
    own = [name for name in {*dir(cls), *fields} if name[0] != "_"]
    for name, remedy in REFUSED.get(cls.__name__, {}).items():
        if name not in own:
            setattr(cls, name, _Refusal(partial(refusal, cls.__name__, name, remedy, own)))
    return cls


class _Refusal:
    """A class attribute that cannot be read.

    The message is made when it is needed: to find the closest names of all takes 40 ms.
    """

    def __init__(self, message: Callable[[], str]) -> None:
        self._message = message

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise UnsupportedNameError(self._message())


# Names of modules.


def missing(name: str, known: Iterable[str]) -> Exception:
    """Return the error for a name that the module ``mie`` does not have, for its ``__getattr__``.

    For a name of vLLM it is an `UnsupportedImportError` with the remedy.
    """
    remedy = REFUSED["mie"].get(name) or REFUSED["modules"].get(name)
    if remedy is None:
        return AttributeError(f"module 'mie' has no attribute {name!r}")
    return UnsupportedImportError(refusal("mie", name, remedy, known))


# Arguments.


def neutral_accepted(cls: type[T]) -> type[T]:
    """Decorate a class so that it has vLLM's parameters at values without effect.

    They are keywords, and attributes that may be read and assigned. Any other value raises
    `ConfigError`.
    """
    table, original = NEUTRAL[cls.__name__], cls.__init__

    @functools.wraps(original)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        for name in table.keys() & kwargs.keys():
            table[name].check(name, kwargs.pop(name))
        original(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[assignment]  # the same keywords, and a few more
    for name, each in table.items():
        setattr(cls, name, _Unused(name, each))
    return cls


class _Unused:
    """An attribute that has its first neutral value and accepts only neutral values."""

    def __init__(self, name: str, neutral: Neutral) -> None:
        self._name, self._neutral = name, neutral

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self._neutral.values[0]

    def __set__(self, instance: object, value: Any) -> None:
        self._neutral.check(self._name, value)


def refuse_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first of ``options`` that no method may have without effect.

    ``function`` is the function that was called with them beside its own parameters.
    """
    neutral = NEUTRAL["calls"]
    for name, value in options.items():
        if name in neutral:
            neutral[name].check(name, value)
            continue
        known = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD and parameter.name != "self"
        ]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
        if "chat_template_kwargs" in known:
            hint += " (variables of the template go into chat_template_kwargs)"
        raise ConfigError(f"{function.__qualname__} has no parameter {name!r}; {hint}")
