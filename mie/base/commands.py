"""Run a command and return its output, or raise the reason why there is none."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

GRACE = 2.0
"""Seconds between the interrupt of a command that is given up and its end."""


class CommandError(Exception):
    """A command did not succeed. The message has the reason: "is not installed"."""

    def __init__(self, why: str, errors: str = "") -> None:
        super().__init__(why)
        self.errors = errors
        """The standard error of the command."""


class NoAnswerError(CommandError):
    """A command took longer than it was given."""


def run_command(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run ``command`` without input and return its output.

    When this function returns or raises, the command and its children have ended. ``environment``
    replaces the variables of this process.

    Raises:
        CommandError: it is missing or failed.
        NoAnswerError: it took longer than ``timeout`` seconds.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that its children can be ended with it
        )
    except FileNotFoundError:
        raise CommandError("is not installed") from None
    except OSError as error:
        raise CommandError(f"cannot be run: {error}") from None
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"gave no answer within {timeout:g} s") from None
    finally:
        if process.poll() is None:
            _end(process)
    if process.returncode < 0:
        raise CommandError(f"was ended by signal {_signal_name(-process.returncode)}", errors)
    if process.returncode:
        last = errors.strip().rpartition("\n")[2].strip() or "no message"
        raise CommandError(f"ended with code {process.returncode}: {last}", errors)
    return output


def _end(process: "subprocess.Popen[str]") -> None:
    """Interrupt a command, so that it can end the commands that it runs, and then kill it."""
    for number, seconds in ((signal.SIGINT, GRACE), (signal.SIGKILL, None)):
        with suppress(OSError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=seconds)


def _signal_name(number: int) -> str:
    """Return the name. A real-time signal has only a number."""
    return next((known.name for known in signal.Signals if known == number), str(number))
