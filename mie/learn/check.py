"""Check a learner's file in a process of its own, so that no loop of the file can hang mie."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from mie.base.commands import CommandError, NoAnswerError, run_command
from mie.errors import ConfigError
from mie.learn.exercises import exercise_of, program

PATIENCE = 10.0
"""Seconds for the process to start and to report, in addition to the trial."""

_CHILD = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); "
    "from mie.learn.child import main; main(*sys.argv[1:])"
)
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""The matrices are so small that threads would only wait for each other."""


def check(path: Path, timeout: float) -> dict[str, Any]:
    """Return the verdict about a file: ``is_solved``, ``rule``, ``lines`` and ``printed``.

    The trial ends after ``timeout`` seconds.

    Raises:
        ConfigError: the file is missing, or is the file of no exercise.
    """
    exercise = exercise_of(path.name)
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist; {program()} learn start DIR writes the exercises"
        )
    command = [sys.executable, "-W", "ignore", "-c", _CHILD, "\n".join(sys.path)]
    environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}
    lines = []
    try:
        output = run_command(
            [*command, str(path.resolve()), str(timeout)],
            timeout=timeout + PATIENCE,
            environment=environment,
        )
        return dict(json.loads(output))
    except NoAnswerError:
        lines.append(f"{exercise.name} was ended: it did not stop {timeout:g} s after it began.")
        lines.append("Look for a loop that catches every exception, or waits.")
    except CommandError as error:
        lines.append(f"The process that ran {exercise.name} {error}.")
    except ValueError:
        lines.append(f"{exercise.name} ended Python before the check was over.")
    return {"is_solved": False, "rule": None, "lines": lines, "printed": ""}
