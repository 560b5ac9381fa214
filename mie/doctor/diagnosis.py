"""Examine a machine: run every check, and try every backend."""

from __future__ import annotations

from dataclasses import dataclass

from mie.doctor.cpu import CPU_CHECKS
from mie.doctor.gpu import GPU_CHECKS
from mie.doctor.jetson import JETSON_CHECKS
from mie.doctor.machine import Machine
from mie.doctor.survey import Check, Survey

BACKENDS = ("numpy", "cupy-emulated", "cupy")
"""The backends of `mie.load.backends`, from those that every machine can run to those that few can.

numpy-plain is left out, because it runs on the same machines as numpy.
"""


@dataclass(frozen=True, kw_only=True)
class BackendTrial:
    """Whether a backend works, as tried. ``reason`` says why it does not."""

    name: str
    works: bool
    reason: str | None = None


def run_checks(machine: Machine) -> list[Check]:
    """Return the results in the order of the tables of checks."""
    survey = Survey(machine)
    checks = {**CPU_CHECKS, **GPU_CHECKS, **(JETSON_CHECKS if survey.is_jetson else {})}
    return [Check(name, *found) for name, check in checks.items() for found in check(survey)]


def try_backend(machine: Machine, name: str) -> BackendTrial:
    """Load the backend ``name`` and let it compute a small step."""
    reason = machine.ask("backend", name).get("error")
    return BackendTrial(name=name, works=reason is None, reason=reason)
