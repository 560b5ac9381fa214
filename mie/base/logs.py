"""Log by Python's rules for libraries: to loggers under "mie", and without own output.

``MIE_LOGGING_LEVEL`` sets the level. The command line shows the records. A program that uses the
library gets them after ``logging.basicConfig()``.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def set_up_logging() -> None:
    """Set the level that ``MIE_LOGGING_LEVEL`` names. Without it, the program's own level holds."""
    logger = logging.getLogger("mie")
    logger.addHandler(logging.NullHandler())
    level = os.environ.get("MIE_LOGGING_LEVEL", "").upper()
    if level in LEVELS:
        logger.setLevel(level)
    elif level:
        known = ", ".join(LEVELS)
        message = f"MIE_LOGGING_LEVEL must be one of {known}; got {level!r}, which has no effect"
        warnings.warn(message, stacklevel=2)


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Show the records on standard error, as the command line does."""
    logger = logging.getLogger("mie")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format())
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"mie: {record.levelname.lower()}: {super().format(record)}"


class _Step(Protocol):
    """The statistics of a step that `PreemptionWarnings` needs."""

    @property
    def step(self) -> int: ...

    @property
    def num_preempted(self) -> int: ...


class PreemptionWarnings:
    """An observer of an engine that warns of preemptions, at most once in many steps."""

    def __init__(self, steps_between: int = 1000) -> None:
        self._logger = logging.getLogger("mie.engine.engine")
        self._steps_between = steps_between
        self._num_new = 0
        self._num_in_all = 0
        self._next_step = 0

    def __call__(self, stats: _Step) -> None:
        """Count the step's preemptions, and warn if the last warning is long ago."""
        self._num_new += stats.num_preempted
        self._num_in_all += stats.num_preempted
        if not self._num_new or stats.step < self._next_step:
            return
        self._logger.warning(
            "the KV cache is too small for what runs: %d preemptions since the last warning, %d in"
            " all (raise num_blocks or kv_cache_memory_bytes, or lower max_num_seqs)",
            self._num_new,
            self._num_in_all,
        )
        self._num_new, self._next_step = 0, stats.step + self._steps_between
