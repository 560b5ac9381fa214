"""Know everything about a setting that its name, type and default do not say.

A setting is a field of a dataclass. ``settings.json``, beside the module of that dataclass, has a
row for each of its settings. The checks, the command-line options, the refusals of backends and of
the simulator, and the tables of the docs read it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

Kind = Literal["integer", "size", "number", "switch", "choice", "text", "mapping", "object"]
"""The kind of value. A size is an integer of bytes, and an object has no command-line option."""

_PACKAGE = Path(__file__).parents[1]

BACKENDS = ("jit", "numpy", "numpy-plain", "cupy", "cupy-emulated")
AUTO_BACKENDS = ("jit", "numpy")
"""The backends that "auto" chooses from, in order."""
ON_CPU_THREADS = ("auto", *AUTO_BACKENDS)
"""The values of ``backend`` that compute with a number of threads, for any batch alike if asked."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Facts about a setting besides its name, type and default."""

    kind: Kind
    help: str
    """Help text: one phrase in lower case, without the default."""
    section: str
    low: float = 0
    high: float | None = None
    above_low: bool = False
    choices: tuple[str, ...] = ()
    is_optional: bool = False
    """Whether None is allowed."""
    default_text: str = ""
    """Text for the default if its value does not explain itself, such as None."""
    backends: tuple[str, ...] = ()
    """The backends that the setting belongs to, or empty if it belongs to the engine."""
    is_ignorable: bool = False
    """Whether `EngineArgs` accepts it where it has no effect, as vLLM does."""
    is_simulated: bool = True
    """Whether it has an effect on a simulated engine."""
    alias_of: str = ""
    """The setting that this one is an alias of."""


def settings_of(cls: type) -> Iterator[tuple[str, Any, Setting]]:
    """Yield (name, default, facts) of each setting of a dataclass, in order."""
    yield from _settings_of(cls)


@cache
def _settings_of(cls: type) -> list[tuple[str, Any, Setting]]:
    rows: dict[str, Mapping[str, Any]] = {}
    for base in cls.__mro__:
        package, *room, _ = ["", *base.__module__.split(".")][-3:]
        if package == "mie":
            rows = {**_tables(*room).get(base.__name__, {}), **rows}
    return [
        (each.name, each.default, _setting(each.default is None, rows[each.name]))
        for each in fields(cls)
        if each.name in rows
    ]


@cache
def _tables(room: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of each dataclass in the settings of a room, by its name."""
    path = _PACKAGE / room / "settings.json"
    tables: Mapping[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return tables


def _setting(is_optional: bool, row: Mapping[str, Any]) -> Setting:
    lists = {name: tuple(row[name]) for name in ("choices", "backends") if name in row}
    return Setting(**{"is_optional": is_optional, **row, **lists})
