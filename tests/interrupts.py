"""Raise exceptions at chosen lines, as a signal or a lack of memory does.

Nothing here depends on time: a trace function counts the lines of `mie` and raises at one of them.
"""

import dis
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

import mie

ROOT = os.path.dirname(mie.__file__)


class Alarm(Exception):
    """The exception that the handler of SIGALRM raises."""


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _raise_alarm(number: int, frame: FrameType | None) -> None:
    raise Alarm


def _raise_memory_error() -> None:
    raise MemoryError("injected")


KINDS: dict[str, tuple[Callable[[], object], type[BaseException]]] = {
    "SIGINT": (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
    "SIGTERM": (lambda: signal.raise_signal(signal.SIGTERM), SystemExit),
    "SIGALRM": (lambda: signal.raise_signal(signal.SIGALRM), Alarm),
    "MemoryError": (_raise_memory_error, MemoryError),
}


@contextmanager
def handlers() -> Iterator[None]:
    """Install handlers of SIGTERM and SIGALRM that raise, for the duration of the block."""
    before = [
        (signal.SIGTERM, signal.signal(signal.SIGTERM, _raise_exit)),
        (signal.SIGALRM, signal.signal(signal.SIGALRM, _raise_alarm)),
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class Injector:
    """Raises at a line of `mie`, and optionally once more at a call soon afterwards."""

    def __init__(
        self,
        strike: Callable[[], object],
        line: int,
        second_call: int | None = None,
        counts: Callable[[FrameType], bool] = lambda frame: True,
    ):
        """``counts`` tells whether a line of a frame counts."""
        self.num_lines = 0
        """Number of lines that ran."""
        self.where: list[str] = []
        """The lines at which it raised."""
        self._strike = strike
        self._line = line
        self._second_call = second_call
        self._counts = counts

    def run(self, function: Callable[[], object]) -> object:
        """Call the function with interruptions."""
        sys.settrace(self._trace)
        try:
            return function()
        finally:
            sys.settrace(None)
            sys.setprofile(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._trace_lines if frame.f_code.co_filename.startswith(ROOT) else None

    def _trace_lines(self, frame: FrameType, event: str, argument: Any) -> Any:
        is_line = event == "line" and not _leaves_with(frame) and not _is_nop(frame)
        if is_line and self._counts(frame):
            self.num_lines += 1
            if self.num_lines == self._line:
                self.where.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                if self._second_call is not None:
                    sys.setprofile(self._profile)
                self._strike()
        return self._trace_lines

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Restart tracing at calls, because Python does not call a trace function again after it
        raised."""
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            assert self._second_call is not None
            self._second_call -= 1
            if self._second_call == 0:
                self.where.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                self._strike()


def _leaves_with(frame: FrameType) -> bool:
    """Return whether the line event is the exit of a ``with``.

    The interpreter checks for signals after calls and at backward jumps. So none can arrive between
    the last call inside a ``with`` and the release of its lock. The trace function is called once
    more there, for the line of the ``with``.
    """
    first = _with_lines(frame.f_code).get(frame.f_lineno)
    return first is not None and frame.f_lasti > first


def _is_nop(frame: FrameType) -> bool:
    """Return whether the line is that of a ``try``, where the interpreter does not check for
    signals.

    It does not expect an exception there either: the line belongs to no enclosing ``with``.
    """
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["NOP"]


@cache
def _with_lines(code: CodeType) -> dict[int, int]:
    """Return the offset at which each line with a ``with`` statement has entered it."""
    lines: dict[int, int] = {}
    line = code.co_firstlineno
    starts = dict(dis.findlinestarts(code))
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        if instruction.opname in ("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL"):
            lines.setdefault(line, instruction.offset)
    return lines
