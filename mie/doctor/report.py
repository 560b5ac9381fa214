"""What the checks say, and the report they make together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from mie.doctor.machine import Machine, NoAnswer

BACKENDS = ("numpy", "cupy-emulated", "cupy")
"""Those of `mie.backend`, from what every machine can run to what few can; without numpy-plain,
which runs wherever numpy does."""

Status = Literal["ok", "note", "problem"]
Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at.

    A "note" costs speed, or is not there and may well not be needed; a "problem" keeps something
    that is there from working. ``remedy`` is what to do, where something is to be done.
    """

    name: str
    status: Status
    value: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        assert self.remedy or self.status != "problem", self


@dataclass(frozen=True, kw_only=True)
class BackendReport:
    """Whether a backend works, as tried; ``reason`` says why it does not."""

    name: str
    works: bool
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every check, and every backend that was tried."""

    checks: tuple[Check, ...]
    backends: tuple[BackendReport, ...]


def try_backend(machine: Machine, name: str) -> BackendReport:
    """The backend ``name``, loaded and given a small step to compute."""
    try:
        facts = machine.ask("backend", name)
    except NoAnswer as why:
        return BackendReport(name=name, works=False, reason=f"the process that tried it {why}")
    works = facts.get("works") is True
    reason = None if works else str(facts.get("reason", "no reason was given"))
    return BackendReport(name=name, works=works, reason=reason)


def version_of(value: Any) -> Version | None:
    """The numbers a version begins with: (14, 2, 0) of "14.2.0rc1", or of a list of numbers."""
    if isinstance(value, list):
        return tuple(value)
    match = re.match(r"\d+(\.\d+)*", str(value))
    return tuple(map(int, match[0].split("."))) if match else None


def dotted(version: Version) -> str:
    """ "12.6" of (12, 6)."""
    return ".".join(map(str, version))


def gibibytes(num_bytes: int) -> str:
    """ "7.4 GiB", in one unit, so that amounts can be compared at a glance."""
    return f"{num_bytes / 2**30:.1f} GiB"


def numbers(text: str | None) -> Iterator[int]:
    """The whole numbers among the words of ``text``."""
    return (int(word) for word in (text or "").split() if re.fullmatch(r"-?\d+", word, re.ASCII))
