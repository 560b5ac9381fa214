"""Examine a machine: run every check, and try every backend."""

from __future__ import annotations

from dataclasses import dataclass

from mie.doctor.cpu import CPU_CHECKS
from mie.doctor.gpu import GPU_CHECKS
from mie.doctor.machine import Machine
from mie.doctor.survey import Check, Survey

BACKENDS = ("numpy", "cupy-emulated", "cupy")
"""The backends of `mie.load.backends`, from those that every machine can run to those that few can.

numpy-plain is left out, because it runs on the same machines as numpy.
"""

CHECKS = {**CPU_CHECKS, **GPU_CHECKS}
"""What each check is called, and the function that returns its findings. Most return one."""


@dataclass(frozen=True, kw_only=True)
class BackendTrial:
    """Whether a backend works, as tried. ``reason`` says why it does not."""

    name: str
    works: bool
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of every check, and every backend that was tried."""

    checks: tuple[Check, ...]
    backends: tuple[BackendTrial, ...]


def examine(machine: Machine, backends: tuple[str, ...] = BACKENDS) -> Diagnosis:
    """Check ``machine`` and try ``backends``."""
    return Diagnosis(
        checks=run_checks(machine),
        backends=tuple(try_backend(machine, name) for name in backends),
    )


def run_checks(machine: Machine) -> tuple[Check, ...]:
    """Return the results in the order of `CHECKS`."""
    survey = Survey(machine)
    found = ((name, finding) for name, check in CHECKS.items() for finding in check(survey))
    return tuple(Check(name, *finding) for name, finding in found)


def try_backend(machine: Machine, name: str) -> BackendTrial:
    """Load the backend ``name`` and let it compute a small step."""
    facts = machine.try_to_ask("backend", name)
    if facts.get("works") is True:
        return BackendTrial(name=name, works=True)
    reason = facts.get("reason") or facts.get("error", "no reason was given")
    return BackendTrial(name=name, works=False, reason=str(reason))
