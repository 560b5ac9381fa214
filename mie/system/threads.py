"""Start threads, or say why the system refuses one."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from mie.errors import ThreadLimitError

P = ParamSpec("P")
T = TypeVar("T")


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        ThreadLimitError: the system refuses it.
    """
    with refusal_explained(thread.name):
        thread.start()


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
