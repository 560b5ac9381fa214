"""Refuse the parameters of vLLM that mie does not have, unless their value has no effect."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mie.base.refusals import NEUTRAL, Neutral
from mie.config.params.values import shown
from mie.errors import ConfigError

T = TypeVar("T")


def neutral_accepted(cls: type[T]) -> type[T]:
    """Decorate a class so that it has the parameters of `NEUTRAL` at values without effect.

    They are keywords, and attributes that may be read and assigned. Any other value raises
    `ConfigError`.
    """
    table, original = NEUTRAL[cls.__name__], cls.__init__

    @functools.wraps(original)
    def __init__(self: T, **kwargs: Any) -> None:
        for name in table.keys() & kwargs.keys():
            _check_neutral(table, name, kwargs.pop(name))
        original(self, **kwargs)

    cls.__init__ = __init__  # type: ignore[assignment]  # the same keywords, and a few more
    for name in table:
        setattr(cls, name, _Neutral(table, name))
    return cls


def refuse_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first of ``options`` that no method may have without effect.

    ``function`` is the function that was called with them beside its own parameters.
    """
    for name, value in options.items():
        if name in NEUTRAL["calls"]:
            _check_neutral(NEUTRAL["calls"], name, value)
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


class _Neutral:
    """An attribute that has its first neutral value and accepts only neutral values."""

    def __init__(self, table: Neutral, name: str) -> None:
        self._table = table
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self._table[self._name][0][0]

    def __set__(self, instance: object, value: Any) -> None:
        _check_neutral(self._table, self._name, value)


def _check_neutral(table: Neutral, name: str, value: Any) -> None:
    neutral, reason = table[name]
    if not any(type(value) is type(each) and value == each for each in neutral):
        allowed = " or ".join(map(repr, neutral))
        raise ConfigError(
            f"{name} is not supported: {reason} (leave it at {allowed}); got {shown(value)}"
        )
