"""Render chat templates in a separate process, under limits that the kernel enforces."""

import json
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mie.base.threads import after_fork
from mie.base.worker import Worker, WorkerEnded, WorkerSilent
from mie.errors import ChatTemplateError, RequestError, WorkerError
from mie.text.render_worker import OUT_OF_MEMORY

CPU_SECONDS = 0.4  # For a request, including compilation.
WALL_SECONDS = 60.0  # A machine that is busy gives a process little of its time.
MEMORY_BYTES = 128 << 20  # On top of the idle worker's memory.
LARGEST_INPUT = 8 << 20  # bytes of the messages and variables as JSON


class TemplateRenderer:
    """Renders templates in a worker process. It starts, kills and replaces the process.

    A template is a program that comes with a model or a request. The worker runs it in jinja2's
    sandbox, within `CPU_SECONDS` and `MEMORY_BYTES`. If a template exceeds them, the worker is
    killed and the caller gets a ChatTemplateError. A worker that does not answer within
    `WALL_SECONDS` is killed too. Any number of threads may call; they take turns. The worker ends
    with its parent, and a forked child starts its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        after_fork(self._forget_worker)

    def _forget_worker(self) -> None:
        """Drop the worker and the lock in a forked child. The parent's threads may hold it."""
        self._lock = threading.Lock()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.forget()

    def start(self) -> None:
        """Start the worker before the first template, without waiting for it."""
        with self._lock:
            if self._worker is None:
                self._worker = _new_worker()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the worker's reply to a request; see `mie.text.render_worker`.

        Raises:
            RequestError: the request is not JSON, or too large.
            ChatTemplateError: a limit stopped the template.
            WorkerError: the worker cannot run, was killed, or did not answer in time.
        """
        data = _as_json(request)
        with self._lock:
            if self._worker is not None and not self._worker.is_alive():
                self._worker.end()  # Something killed it while it was idle.
                self._worker = None
            if self._worker is None:
                self._worker = _new_worker()
            return self._exchange(self._worker, data)

    def close(self) -> None:
        """Stop the worker. The next request starts another."""
        with self._lock:
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.end()

    def _exchange(self, worker: Worker, data: bytes) -> dict[str, Any]:
        reply: dict[str, Any] | None = None
        try:
            text = worker.exchange(data, WALL_SECONDS).decode("utf-8", "surrogatepass")
            reply = json.loads(text)
        except WorkerEnded as end:
            raise _why(end) from None
        except WorkerSilent:
            raise WorkerError(
                "the chat template was not rendered: the worker process did not answer for "
                f"{WALL_SECONDS:g} s and was replaced (send the request again)"
            ) from None
        finally:
            if reply is None or reply["is_last"]:  # an interrupt may have left a partial message
                self._worker = None
                worker.end()
        assert reply is not None
        return reply


def _new_worker() -> Worker:
    packages = ("jinja2", "markupsafe")
    return Worker("mie.text.render_worker", packages, CPU_SECONDS, MEMORY_BYTES)


def _as_json(request: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(request, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"messages, tools and template variables must be JSON values: {error}"
        ) from error
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > LARGEST_INPUT:
        raise RequestError(
            f"messages, tools and template variables are {len(data):,} bytes of JSON;"
            f" the limit is {LARGEST_INPUT:,}"
        )
    return data


def _plain(value: object) -> Any:
    """Convert mappings and sequences of other types to dicts and lists."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"got a value of type {type(value).__name__}")


def _why(end: WorkerEnded) -> ChatTemplateError | WorkerError:
    if end.returncode == -signal.SIGPROF:
        return ChatTemplateError(
            f"did not end: it was stopped after {CPU_SECONDS:g} s of CPU time;"
            " does it loop, or build huge values?"
        )
    if end.returncode == OUT_OF_MEMORY:
        return ChatTemplateError(
            f"was stopped: it needed more than {MEMORY_BYTES >> 20} MiB of memory;"
            " does it build huge values?"
        )
    return WorkerError(
        f"the chat template was not rendered: the worker process ended ({end}); send the request "
        "again"
    )
