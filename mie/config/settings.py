"""How a setting is declared: in one place, with all that is said of it elsewhere.

A setting is a field of a dataclass, made by `setting`. The checks, the options of the command line,
the refusals of the backends and of the simulator, and the tables of the docs read its `Setting`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Kind = Literal["integer", "size", "number", "switch", "choice", "text", "mapping", "object"]
"""What the values are; a size is an integer of bytes, an object has no command-line option."""

BACKENDS = ("numpy", "numpy-plain", "cupy", "cupy-emulated")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is said of a setting besides its name, type and default."""

    kind: Kind
    help: str
    """One phrase in lower case, without the default."""
    section: str
    low: float = 0
    high: float | None = None
    above_low: bool = False
    choices: tuple[str, ...] = ()
    is_optional: bool = False
    """Whether it may be None."""
    default_text: str = ""
    """What None, or another default that needs words, comes to."""
    backends: tuple[str, ...] = ()
    """The backends whose own setting it is. Empty: it belongs to the engine."""
    is_ignorable: bool = False
    """Whether `EngineArgs` accepts it where it changes nothing, as vLLM does."""
    is_simulated: bool = True
    """Whether it means something to a simulated engine."""
    alias_of: str = ""
    """The setting that this is another name of."""


def setting(default: object, kind: Kind, help: str, section: str, **more: Any) -> Any:
    """Return a dataclass field for a setting; ``more`` are fields of `Setting`."""
    declared = Setting(
        kind=kind, help=help, section=section, **{"is_optional": default is None, **more}
    )
    return field(default=default, metadata={"setting": declared})


def settings_of(cls: type) -> Iterator[tuple[str, Any, Setting]]:
    """(name, default, declaration) of each setting of a dataclass, in its order."""
    for each in fields(cls):
        if "setting" in each.metadata:
            yield each.name, each.default, each.metadata["setting"]


@dataclass(frozen=True, kw_only=True)
class Neutral:
    """What is said of an argument that only vLLM has: the values that change nothing here."""

    allowed: tuple[Any, ...] | None
    """None: every value."""
    why: str
    """The reason why other values cannot be had, or why no value changes anything."""


def neutral(default: object, why: str, *also: object) -> Any:
    """Return a dataclass field that may have its default, or one of the values ``also`` named."""
    return field(default=default, metadata={"neutral": Neutral(allowed=(default, *also), why=why)})


def without_effect(default: object, why: str) -> Any:
    """Return a dataclass field that may have any value, since none changes anything."""
    return field(default=default, metadata={"neutral": Neutral(allowed=None, why=why)})
