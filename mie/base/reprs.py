"""Format objects and amounts as short text."""

from dataclasses import MISSING, Field, fields
from typing import Any

_MOST_ITEMS = 8


def short_repr(self: Any) -> str:
    """Return the fields of a dataclass that are not None, with long lists shortened."""
    values = {field.name: getattr(self, field.name) for field in fields(self) if field.repr}
    return _call(self, {name: value for name, value in values.items() if value is not None})


def changed_repr(self: Any) -> str:
    """Return the fields of a dataclass that differ from their defaults."""
    changed = [field.name for field in fields(self) if not _is_default(self, field)]
    return _call(self, {name: getattr(self, name) for name in changed})


def count(number: int, noun: str) -> str:
    """Return the amount and its noun: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def clipped(text: str, width: int) -> str:
    """Return the text, cut with an ellipsis if it is longer than ``width``."""
    return text if len(text) <= width else text[: width - 1] + "…"


def _is_default(owner: Any, field: Field[Any]) -> bool:
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    return bool(getattr(owner, field.name) == default)


def _call(owner: Any, values: dict[str, Any]) -> str:
    inner = ", ".join(f"{name}={_shortened(value)}" for name, value in values.items())
    return f"{type(owner).__name__}({inner})"


def _shortened(value: Any) -> str:
    if not isinstance(value, (list, tuple)) or len(value) <= _MOST_ITEMS:
        return repr(value)
    left, right = "[]" if isinstance(value, list) else "()"
    return f"{left}{', '.join(map(repr, value[:_MOST_ITEMS]))}, … {len(value)} in all{right}"
