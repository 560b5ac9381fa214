"""Define the kinds of records in the event log. docs/tracing.md explains each one.

A record is a plain tuple ``(kind, *fields)``, and lists in it are tuples. The code that changes
state emits a record at the moment of the change. So a snapshot and the records after it give the
state at any step.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from mie.errors import TraceError, shown

MAX_INTEGER = 2**63 - 1
"""Largest id or count: a signed 64-bit integer."""

MAX_NUMBER = 1e15
"""Largest count or time in a summary: integers up to here are exact as floats."""

MAX_BLOCK_SIZE = 1 << 16
MAX_CHOICES = 1 << 10
MAX_WORD = 100
"""Maximum number of characters in a reason, a rule, a mode or a cause."""

Seq = tuple[int, int]
"""A sequence: the number of its request and the index of the choice."""

Record = tuple[Any, ...]

Step = tuple[Record, ...]
"""The records of one step. The last one is ``("step", summary)``."""

Summary = Mapping[str, Any]
Snapshot = Mapping[str, Any]

FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        kind: tuple(names)
        for kinds in json.loads(
            Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
        ).values()
        for kind, names in kinds.items()
    }
)
"""The fields of each kind of record, in order."""

MAX_FORCED_RUN = 64
"""Maximum ``count`` of a ``force``."""

SUMMARY_FIELDS = (
    *("step", "num_running", "num_waiting", "num_prefill_tokens", "num_decode_tokens"),
    *("num_preempted", "num_finished", "num_blocks_used", "num_blocks_cached", "num_blocks_saved"),
    *("num_slots_empty", "num_copies", "num_evicted", "num_exported", "num_imported"),
    *("start", "schedule_seconds", "run_seconds", "update_seconds", "seconds"),
)
"""The keys that the summary of a step has at least."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A snapshot and the steps after it."""

    after: int
    """The number of the last step before the snapshot; 0 if there was none."""
    snapshot: Snapshot
    steps: Sequence[Step]
    rest: Step = ()
    """Records after the last complete step."""
    is_cut: bool = False
    """Whether the file ends in the middle of a line, as a killed run leaves it."""

    @property
    def last(self) -> int:
        """The number of the last step."""
        return int(summary_of(self.steps[-1])["step"]) if self.steps else self.after


def summary_of(step: Step) -> Summary:
    """Return the summary that ends a step."""
    kind, summary = step[-1]
    assert kind == "step"
    return summary  # type: ignore[no-any-return]  # fields of a record are Any


# Checks of fields from a file that may be untrusted.

Shape: TypeAlias = Callable[[Any], bool]


def checked(fields: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields called ``names``, with tuples in place of JSON's lists.

    Raises:
        TraceError: a field is missing or has the wrong shape.
    """
    if not isinstance(fields, dict):
        raise TraceError(f"{shown(fields)} is not an object")
    found = {}
    for name in names:
        if name not in fields:
            raise TraceError(f"{name} is missing")
        value = fields[name]
        found[name] = tuple(value) if isinstance(value, list) else value
        if not _SHAPES.get(name, _is_integer)(found[name]):
            raise TraceError(f"{name} cannot be {shown(found[name])}")
    return found


def check_summary(fields: Mapping[str, Any]) -> None:
    """Raise `TraceError` unless the `SUMMARY_FIELDS` are numbers in 0 … `MAX_NUMBER`."""
    for name in SUMMARY_FIELDS:
        value = fields.get(name)
        if not isinstance(value, (int, float)) or not 0 <= value <= MAX_NUMBER:
            raise TraceError(f"{name} is {shown(value)}, not a number in 0 … {MAX_NUMBER:.0f}")


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= MAX_INTEGER


def _is_word(value: Any) -> bool:
    return _is_text(value) and value.isprintable() and len(value) <= MAX_WORD


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_integers(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_integer, value))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_integer, value))


def _is_pair(value: Any) -> bool:
    return _is_integers(value) and len(value) == 2


def _is_up_to(largest: int) -> Shape:
    return lambda value: _is_integer(value) and 1 <= value <= largest


def _or_none(*shapes: Shape) -> Shape:
    return lambda value: value is None or any(fits(value) for fits in shapes)


_SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        **dict.fromkeys(("mode", "rule", "reason", "cause"), _is_word),
        "request_id": _is_text,
        "block_size": _is_up_to(MAX_BLOCK_SIZE),
        "n": _is_up_to(MAX_CHOICES),
        **dict.fromkeys(("max_tokens", "source", "row", "nearest"), _or_none(_is_integer)),
        **dict.fromkeys(
            ("choices", "rows", "blocks", "tokens", "entry", "cached", "got"), _is_integers
        ),
        "entries": lambda value: isinstance(value, tuple) and all(map(_is_list, value)),
        "host": _or_none(_is_integers),
        "salt": _or_none(_is_text),
        "seq": _is_pair,
        "by": _or_none(_is_pair),
        "parent": _or_none(_is_integer, _is_pair),  # of a block, or of a forked sequence
    }
)
"""The shapes of fields. Others are integers."""
