"""Recognise exceptions of signal handlers, which say nothing about the code that they interrupt."""

import signal
import threading


def is_of_the_request(error: BaseException) -> bool:
    """Return whether the request that was being served is to blame for an error."""
    return not isinstance(error, MemoryError) and not raised_by_signal_handler(error)


def raised_by_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler that is written in Python raised ``error``.

    Such an exception can come out of any line that the main thread runs. It says nothing about that
    line.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def _code(handler: object) -> object:
    """Return the code of a function or a method, or None for other objects."""
    return getattr(getattr(handler, "__func__", handler), "__code__", None)
