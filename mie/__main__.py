"""Run the command line of a process, as ``mie`` or ``python -m mie``."""

import signal
import sys
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Run the command line, and return the exit code.

    Every signal ends the program as an exception, so that nothing half-written remains.
    """
    try:
        try:
            _handle(_interrupt)
            from mie.cli import main as run

            return run()
        finally:  # an exception at the end of Python would show a traceback
            _handle(signal.SIG_IGN)
    except KeyboardInterrupt:  # while modules were imported, or the second one of a nervous user
        return 128 + signal.SIGINT
    except Exception as error:
        # The exception of a signal can cause another: a `finally` in argparse of Python 3.11 fails.
        if isinstance(error.__context__, KeyboardInterrupt):
            return 128 + signal.SIGINT
        if isinstance(error.__context__, SystemExit):
            raise error.__context__ from None
        raise


def _handle(handler: Any) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise the exception of a signal. In an import, raise it when the import has ended.

    Extension modules turn an exception in an import of theirs into a traceback and an ImportError.
    """
    is_ctrl_c = number == signal.SIGINT
    error = KeyboardInterrupt() if is_ctrl_c else SystemExit(128 + number)

    def strike(*_: object) -> None:
        raise error

    importer = None
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            importer = frame.f_back
        frame = frame.f_back
    if importer is None or importer.f_trace is not None:  # the second one does not wait
        raise error
    importer.f_trace = strike
    sys.settrace(lambda *_: None)


if __name__ == "__main__":
    sys.exit(main())
