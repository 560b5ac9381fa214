"""Refuse the names of vLLM that mie does not have, each with the remedy.

refusals.json lists them, and docs/vllm.md shows the whole table.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

from mie.errors import UnsupportedImportError, UnsupportedNameError

T = TypeVar("T")

Neutral: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]
"""Maps a parameter to the values that have no effect, and the reason for refusing any other."""

_DATA: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def _by_name(remedies: Mapping[str, str]) -> dict[str, str]:
    """Return the remedy of each name, from the names of each remedy."""
    return {
        name: _DATA["remedies"][remedy[1:]] if remedy.startswith("@") else remedy
        for remedy, names in remedies.items()
        for name in names.split()
    }


REFUSED: Mapping[str, Mapping[str, str]] = {
    owner: _by_name(remedies) for owner, remedies in _DATA["refused"].items()
}
"""Maps a class, or a module of vLLM, to its refused names and their remedies."""

MODULES: Mapping[str, str] = _by_name(_DATA["modules"])
"""Maps a module of vLLM that mie does not have, without "vllm.", to the remedy."""

NEUTRAL: Mapping[str, Neutral] = {
    owner: {name: (tuple(values), why) for name, (values, why) in table.items()}
    for owner, table in _DATA["neutral"].items()
}
"""Parameters of classes, and of methods ("calls"), that are accepted without effect."""


def missing(module: str, name: str) -> Exception:
    """Return the error for a name that a module does not have, for its ``__getattr__``.

    For a name of vLLM it is an `UnsupportedImportError` with the remedy.
    """
    ours = module.replace("vllm", "mie", 1)
    remedy = REFUSED[module].get(name)
    if remedy is None:
        return AttributeError(f"module {ours!r} has no attribute {name!r}")
    return UnsupportedImportError(f"{ours} has no {name}: {remedy}")


def refuses_names(cls: type[T]) -> type[T]:
    """Decorate a class so that each of vLLM's names that it lacks is refused with the remedy.

    Reading one raises `UnsupportedNameError`, an ``AttributeError``, so that ``hasattr`` is False.
    """
    for name, remedy in REFUSED[cls.__name__].items():
        setattr(cls, name, _Refusal(f"{cls.__name__} has no {name}: {remedy}"))
    return cls


class _Refusal:
    """A class attribute that cannot be read."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise UnsupportedNameError(self._message)
