"""Define the results of checks, and the report of them all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mie.doctor.machine import Machine, NoAnswer

BACKENDS = ("numpy", "cupy-emulated", "cupy")
"""The backends of `mie.load.backends`, from those that every machine can run to those that few can.

numpy-plain is left out, because it runs on the same machines as numpy.
"""

Status = Literal["ok", "note", "problem"]
Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check.

    A "note" costs speed, or is missing and may not be needed. A "problem" keeps something that is
    present from working. ``remedy`` says what to do, if anything.
    """

    name: str
    status: Status
    value: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        assert self.remedy or self.status != "problem", self


@dataclass(frozen=True, kw_only=True)
class BackendReport:
    """Whether a backend works, as tried. ``reason`` says why it does not."""

    name: str
    works: bool
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every check, and every backend that was tried."""

    checks: tuple[Check, ...]
    backends: tuple[BackendReport, ...]


def try_backend(machine: Machine, name: str) -> BackendReport:
    """Load the backend ``name`` and let it compute a small step."""
    try:
        facts = machine.ask("backend", name)
    except NoAnswer as why:
        return BackendReport(name=name, works=False, reason=f"the process that tried it {why}")
    works = facts.get("works") is True
    reason = None if works else str(facts.get("reason", "no reason was given"))
    return BackendReport(name=name, works=works, reason=reason)


def version_of(value: Any) -> Version | None:
    """Return the numbers that a version begins with: (14, 2, 0) of "14.2.0rc1" or of a list."""
    if isinstance(value, list):
        return tuple(value)
    match = re.match(r"\d+(\.\d+)*", str(value))
    return tuple(map(int, match[0].split("."))) if match else None


def dotted(version: Version) -> str:
    """Return "12.6" for (12, 6)."""
    return ".".join(map(str, version))


def gibibytes(num_bytes: int) -> str:
    """Return "7.4 GiB" for bytes, always in one unit so that amounts are easy to compare."""
    return f"{num_bytes / 2**30:.1f} GiB"


def numbers(text: str | None) -> Iterator[int]:
    """Yield the whole numbers among the words of ``text``."""
    return (int(word) for word in (text or "").split() if re.fullmatch(r"-?\d+", word, re.ASCII))
