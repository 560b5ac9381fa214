"""Declare settings, each in one place with everything that is said about it elsewhere.

A setting is a field of a dataclass, made by `setting`. The checks, the command-line options, the
refusals of backends and of the simulator, and the tables of the docs read its `Setting`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Kind = Literal["integer", "size", "number", "switch", "choice", "text", "mapping", "object"]
"""The kind of value. A size is an integer of bytes, and an object has no command-line option."""

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


def setting(default: object, kind: Kind, help: str, section: str, **more: Any) -> Any:
    """Return a dataclass field for a setting. ``more`` has further fields of `Setting`."""
    declared = Setting(
        kind=kind, help=help, section=section, **{"is_optional": default is None, **more}
    )
    return field(default=default, metadata={"setting": declared})


def settings_of(cls: type) -> Iterator[tuple[str, Any, Setting]]:
    """Yield (name, default, declaration) of each setting of a dataclass, in order."""
    for each in fields(cls):
        if "setting" in each.metadata:
            yield each.name, each.default, each.metadata["setting"]
