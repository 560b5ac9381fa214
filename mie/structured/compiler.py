"""Compile descriptions one at a time: first in a worker under limits, then in this process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from mie.base.threads import after_fork
from mie.base.worker import Worker, WorkerEnded, WorkerSilent
from mie.errors import WorkerError
from mie.structured.descriptions import Salted
from mie.structured.limits import EXCEEDED, START_SECONDS, WALL_SECONDS

Reply = dict[str, Any]
"""The reply of a worker.

It has a ``grammar`` and its ``num_bytes``, a ``refusal``, an ``error`` of the library, or a
``returncode``.
"""

Work = Callable[[Salted, Callable[[str], Reply]], Any]
"""Compiles a description. With the second argument, the worker compiles the description first."""


class Compiler:
    """Compiles descriptions in a thread. The thread exists while there are any.

    Equal descriptions of a salt are compiled once, and callers take turns. A description that is
    not waited for any more is not compiled, and is stopped if it is being compiled.
    """

    def __init__(self, vocabulary: Callable[[], Mapping[str, Any]], work: Work) -> None:
        """``vocabulary`` returns the arguments of the worker's LLTokenizer."""
        self._vocabulary = vocabulary
        self._work = work
        self._begin()
        after_fork(self._start_over)

    def _start_over(self) -> None:
        """Leave the thread, its jobs and the worker to the parent, in a forked child."""
        if self._worker is not None:
            self._worker.forget()
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._turns: Turns = Turns()
        self._thread: threading.Thread | None = None
        self._worker: Worker | None = None
        self._waker: socket.socket | None = None  # a byte in it wakes the thread

    def submit(self, description: Salted, caller: Hashable) -> Future[Any]:
        """Return the future of the result of the work, or of its error. It may be cancelled.

        Raises:
            WorkerError: the system refuses a thread.
        """
        future: Future[Any] = Future()
        with self._lock:
            job = self._turns.join(description, caller, future)
            if self._thread is None:
                try:
                    self._start_thread()
                except (RuntimeError, OSError) as error:
                    self._turns.leave(job, future)
                    raise WorkerError(
                        _not_compiled(f"no thread can be started: {error}")
                    ) from error
        future.add_done_callback(lambda future: self._leave_if_cancelled(job, future))
        return future

    def _start_thread(self) -> None:
        wake, waker = socket.socketpair()
        waker.setblocking(False)
        thread = threading.Thread(
            target=self._run, args=(wake, waker), name="mie-grammars", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            wake.close()
            waker.close()
            raise
        self._thread, self._waker = thread, waker

    def _leave_if_cancelled(self, job: Job, future: Future[Any]) -> None:
        if future.cancelled():
            with self._lock:
                self._turns.leave(job, future)
                if self._waker is not None:
                    with suppress(BlockingIOError):  # it is full of earlier news
                        self._waker.send(b"!")

    def _run(self, wake: socket.socket, waker: socket.socket) -> None:
        """Compile the jobs that wait, and end."""
        with wake, waker:
            while (job := self._next_job()) is not None:
                outcome: Any = None
                error: BaseException | None = None
                try:
                    outcome = self._work(job.key, partial(self._reply, job, wake))
                except BaseException as failure:
                    error = failure
                with self._lock:
                    self._turns.end(job)
                    futures, job.futures = job.futures, set()  # they refer to this object
                for future in futures:
                    if future.set_running_or_notify_cancel():
                        if error is None:
                            future.set_result(outcome)
                        else:
                            future.set_exception(error)

    def _next_job(self) -> Job | None:
        with self._lock:
            job = self._turns.begin()
            if job is None:
                self._thread = self._waker = None
            return job

    def _reply(self, job: Job, wake: socket.socket, description: str) -> Reply:
        """Compile a description in the worker, and return the reply.

        Raises:
            WorkerError: there is no reply, for which the description is not to blame.
        """
        try:
            worker = self._running_worker()
            return self._exchange(worker, job, wake, description.encode())
        except WorkerEnded as end:
            raise WorkerError(_not_compiled(f"the worker process ended ({end})")) from None
        except WorkerSilent:
            raise WorkerError(_not_compiled("the worker process did not answer in time")) from None

    def _exchange(self, worker: Worker, job: Job, wake: socket.socket, data: bytes) -> Reply:
        reply: Reply | None = None
        try:
            deadline = time.monotonic() + WALL_SECONDS
            worker.send(data, deadline)
            while not worker.wait(wake, deadline):
                wake.recv(1 << 12)
                if not job.futures:
                    worker.send(b"", deadline)
                    break
            reply = json.loads(worker.receive(deadline))
        finally:
            if reply is None:
                self._end_worker()
        assert reply is not None
        returncode = reply.get("returncode", 0)
        if not job.futures or (returncode and returncode not in EXCEEDED):
            raise WorkerEnded(returncode)
        return reply

    def _running_worker(self) -> Worker:
        if self._worker is not None and not self._worker.is_alive():
            self._end_worker()  # something killed it while it was idle
        if self._worker is None:
            vocabulary = json.dumps(self._vocabulary()).encode()
            self._worker = Worker("mie.structured.compile_worker", ["llguidance"])
            try:
                self._worker.exchange(vocabulary, START_SECONDS)
            except BaseException:
                self._end_worker()
                raise
        return self._worker

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


class Job:
    """A job and the callers that wait for it."""

    def __init__(self, key: Salted) -> None:
        self.key = key
        self.futures: set[Future[Any]] = set()
        self.callers: set[Hashable] = set()


class Turns:
    """The jobs that wait, in a queue for each caller. Jobs with equal keys are one.

    The owner's lock protects it.
    """

    def __init__(self) -> None:
        self._jobs: dict[Salted, Job] = {}  # the jobs that wait or run
        self._queues: OrderedDict[Hashable, deque[Job]] = OrderedDict()
        self._running: Job | None = None
        self._last: Hashable = None  # the caller who had the last turn

    def join(self, key: Salted, caller: Hashable, future: Future[Any]) -> Job:
        """Queue a job, or wait for the job with the same key, and return it.

        A job that several callers wait for has a place in each of their queues.
        """
        job = self._jobs.setdefault(key, Job(key))
        job.futures.add(future)
        if caller not in job.callers and job is not self._running:
            job.callers.add(caller)
            self._queues.setdefault(caller, deque()).append(job)
        return job

    def leave(self, job: Job, future: Future[Any]) -> None:
        """Stop waiting for a job. It ends if nothing else waits for it."""
        job.futures.discard(future)
        if not job.futures:
            self.end(job)

    def begin(self) -> Job | None:
        """Return the next job of the caller that is next. The last caller's is the last."""
        self._running = None
        if self._last in self._queues:
            self._queues.move_to_end(self._last)
        if self._queues:
            self._last = next(iter(self._queues))
            self._running = self._queues[self._last][0]
            self._leave_queues(self._running)
        return self._running

    def end(self, job: Job) -> None:
        """Drop a job. An equal description that comes later is a new job."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
            self._leave_queues(job)

    def _leave_queues(self, job: Job) -> None:
        for caller in job.callers:
            self._queues[caller].remove(job)
            if not self._queues[caller]:
                del self._queues[caller]
        job.callers.clear()


def _not_compiled(why: str) -> str:
    return f"structured_outputs was not compiled: {why} (send the request again)"
