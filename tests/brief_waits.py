"""Let threads sleep soon while they wait: tests have more of them than CPUs."""

from mie.ops_cpu import workers

TRIES = 1 << 10
"""Tries of a spin-wait, some 20 microseconds."""


def sleep_soon() -> None:
    """Shorten all spin-waits of this process and of those that it forks."""
    workers.HELPER_TRIES = workers.CALLER_TRIES = TRIES
