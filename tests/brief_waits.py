"""Let threads and processes sleep soon while they wait: tests have more of them than CPUs."""

from mie.ops_cpu.processes import helpers
from mie.ops_cpu.threads import workers

SPINS = 2e-5
"""Seconds of a spin-wait."""


def sleep_soon() -> None:
    """Shorten all spin-waits of this process and of those that it forks."""
    for module in (helpers, workers):
        module.HELPER_SPINS = module.CALLER_SPINS = SPINS
