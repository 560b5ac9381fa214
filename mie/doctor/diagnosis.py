"""Examine a machine: run every check, and try every backend."""

from __future__ import annotations

from mie.doctor.cpu import CPU_CHECKS
from mie.doctor.gpu import GPU_CHECKS
from mie.doctor.jetson import JETSON_CHECKS
from mie.doctor.machine import Machine
from mie.doctor.survey import Check, Survey

BACKENDS = ("numpy", "jit", "cupy-emulated", "cupy")
"""The backends of `mie.load.backends`, from those that every machine can run to those that few can.

numpy-plain is left out, because it runs on the same machines as numpy.
"""


def run_checks(machine: Machine) -> list[Check]:
    """Return the results in the order of the tables of checks."""
    survey = Survey(machine)
    checks = {**CPU_CHECKS, **GPU_CHECKS, **(JETSON_CHECKS if survey.is_jetson else {})}
    return [Check(name, *found) for name, check in checks.items() for found in check(survey)]
