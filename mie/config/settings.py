"""Declare the facts about a setting beyond its name, type and default.

A setting is a field of a dataclass. A row of ``settings.json``, beside its module, declares the
rest. The checks, the command-line options, the refusals of backends and of
the simulator, and the tables of the docs read it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

Kind = Literal["integer", "size", "number", "switch", "choice", "text", "mapping", "list", "object"]
"""The kind of value. A size is an integer of bytes, and an object has no command-line option."""

BACKENDS = ("jit", "numpy", "cupy", "cupy-emulated")
AUTO_BACKENDS = ("jit", "numpy")
"""The backends that "auto" chooses from, in order."""
ON_CPU_THREADS = ("auto", *AUTO_BACKENDS)
"""The values of ``backend`` with the settings ``num_threads`` and ``batch_invariant``."""


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
    default_text: str = ""
    """Text for the default if its value does not explain itself, such as None."""
    backends: tuple[str, ...] = ()
    """The backends that the setting belongs to, or empty if it belongs to the engine."""
    is_ignorable: bool = False
    """Whether `EngineArgs` accepts it where it has no effect, as vLLM does."""
    is_simulated: bool = True
    """Whether it has an effect on a simulated engine."""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """The values of other settings without which this one has no effect and is refused."""
    alias_of: str = ""
    """The setting that this one is an alias of."""


def declared_in(module_file: str, cls: str) -> Mapping[str, Setting]:
    """Return the settings of a class, from ``settings.json`` beside the file of its module."""
    text = Path(module_file).with_name("settings.json").read_text(encoding="utf-8")
    return {name: _setting(**row) for name, row in json.loads(text)[cls].items()}


def _setting(choices: Sequence[str] = (), backends: Sequence[str] = (), **row: Any) -> Setting:
    return Setting(choices=tuple(choices), backends=tuple(backends), **row)


def settings_of(cls: type) -> Iterator[tuple[str, Any, Setting]]:
    """Yield (name, default, facts) of each setting of a dataclass, in order.

    Each class that declares settings has them in ``SETTINGS``.
    """
    declared: dict[str, Setting] = {}
    for base in cls.__mro__:
        declared = {**vars(base).get("SETTINGS", {}), **declared}
    for each in fields(cls):
        if each.name in declared:
            yield each.name, each.default, declared[each.name]
