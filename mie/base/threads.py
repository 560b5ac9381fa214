"""Start threads, call functions in threads, and recognize the exceptions of signal handlers."""

import contextvars
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from mie.errors import ThreadLimitError

P = ParamSpec("P")
T = TypeVar("T")

MAX_SYSTEM_NAME = 15
"""Characters of a thread's name that Linux keeps."""


def after_fork(method: Callable[[], object]) -> None:
    """Call a method in each forked child, as long as its object exists."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    os.register_at_fork(after_in_child=call)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, with its name in `top -H` too.

    Raises:
        ThreadLimitError: the system refuses it.
    """
    with refusal_explained(thread.name):
        thread.start()
    show_name(thread)


def show_name(thread: threading.Thread) -> None:
    """Give the system the name of a started thread. Python 3.14 does so itself."""
    with suppress(OSError):  # it has ended, or there is no /proc
        comm = Path(f"/proc/self/task/{thread.native_id}/comm")
        comm.write_text(thread.name[:MAX_SYSTEM_NAME], encoding="utf-8")


async def call_in_thread(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function in a thread, as `asyncio.to_thread` does.

    Raises:
        ThreadLimitError: the system refuses the thread.
    """
    import asyncio  # takes 20 ms, and every caller has it already

    call = partial(contextvars.copy_context().run, function, *args, **keywords)
    with refusal_explained("a worker of the event loop"):
        future = asyncio.get_running_loop().run_in_executor(None, call)
    return await future


@contextmanager
def refusal_explained(what: str) -> Iterator[None]:
    """Raise `ThreadLimitError` if the block cannot start a thread, for which ``what`` is a name."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise ThreadLimitError(
            f"the system refuses another thread ({what}); this process has "
            f"{threading.active_count()} (raise the limit of processes, `ulimit -u`, or that of "
            "the container, pids.max, or free memory)"
        ) from error


def is_of_the_request(error: BaseException) -> bool:
    """Return whether the request that was being served is to blame for an error."""
    return not isinstance(error, MemoryError) and not raised_by_signal_handler(error)


def raised_by_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler that is written in Python raised ``error``.

    Such an exception can come out of any line that the main thread runs, whatever the line does.
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
