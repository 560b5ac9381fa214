"""Start the processes of the other ranks of an engine, and run a rank in one of them."""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mie.base import worker_side
from mie.base.worker import Worker, WorkerEnded, WorkerSilent
from mie.checkpoint.gguf.header import GgufHeader
from mie.errors import WorkerError
from mie.load.backends import choose_backend
from mie.load.device import load_device_part, new_slots, prepare
from mie.load.opened import open_model
from mie.load.settings import LoadSettings
from mie.load.sizing import MemoryPlan
from mie.model.config import ModelConfig
from mie.model.layers.adapters import AdapterSlots
from mie.ops.adapters.low_rank import LowRank
from mie.ops.backend import Array, StepBatch
from mie.ranks.backend import RankBackend
from mie.ranks.exchange import Abandoned, Exchange

_PROGRAM = "mie.load.rank_program"
_OF_ENVIRONMENT = (
    *("CUDA_", "CUPY_", "CXX", "HOME", "MIE_", "NCCL_", "NUMBA_", "OMP_", "OPENBLAS_", "PATH"),
    *("TMPDIR", "XDG_"),
)
"""Beginnings of the names of variables that a rank needs as rank 0 has them."""
_SECONDS_TO_START = 60.0
_SECONDS_TO_EXPLAIN = 5.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """Everything that a rank needs to load its part."""

    directory: Path
    settings: LoadSettings
    model: ModelConfig
    plan: MemoryPlan


class Ranks:
    """The processes of all ranks but 0. They end with this object, or with this process."""

    def __init__(self, backend: RankBackend, order: Order) -> None:
        """Start the processes. They load their parts while this one loads its own.

        Raises:
            WorkerError: a process cannot be started.
        """
        self.num_ranks = backend.share.num_ranks
        self._workers: list[Worker] = []
        self._fault: str | None = None
        size = backend.exchange_bytes()
        file = os.memfd_create("mie-ranks")
        try:
            os.ftruncate(file, size)
            exchange = Exchange(mmap.mmap(file, size), backend.share, self.check)
            exchange.set_up()
            backend.connect(exchange)
            data = pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
            names = [name for name in os.environ if name.startswith(_OF_ENVIRONMENT)]
            environment = {name: os.environ[name] for name in names}
            for rank in range(1, self.num_ranks):
                packages = ("numpy", "ml_dtypes")
                worker = Worker(_PROGRAM, packages, rank, file, os.getpid(), inherited=(file,))
                self._workers.append(worker)
                deadline = time.monotonic() + _SECONDS_TO_START
                worker.send(pickle.dumps((sys.path, environment)), deadline)
                worker.send(data, deadline)
        except (WorkerEnded, WorkerSilent) as error:
            self.end()
            raise WorkerError(self._ended(len(self._workers), str(error))) from error
        finally:
            os.close(file)

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [worker.pid for worker in self._workers]

    def check(self) -> None:
        """Raise `WorkerError` if a rank has ended. The others are then ended too."""
        if self._fault is None:
            ended = [rank for rank, each in enumerate(self._workers, 1) if not each.is_alive()]
            if not ended:
                return
            reason = self._reason(self._workers[ended[0] - 1])
            self._fault = self._ended(ended[0], reason)
            self.end()
        raise WorkerError(self._fault)

    @contextmanager
    def loading(self, backend: RankBackend) -> Iterator[None]:
        """Wait at the end of the block until all ranks have loaded. An error ends them."""
        try:
            yield
            with backend.command("ready"):
                pass
        except BaseException:
            self.end()
            raise

    def _ended(self, rank: int, reason: str) -> str:
        return f"rank {rank} of {self.num_ranks} has ended: {reason or 'without a reason'}"

    def end(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.end()

    @staticmethod
    def _reason(worker: Worker) -> str:
        """Return the last words of a process that has ended."""
        try:
            return worker.receive(time.monotonic() + _SECONDS_TO_EXPLAIN).decode()
        except (WorkerEnded, WorkerSilent) as error:
            return str(error)


def run_rank(rank: int, file: int, parent: int) -> None:
    """Load a part of a model as rank 0 orders, and run its commands until it ends."""
    data = worker_side.read_message()
    if data is None:
        return
    order: Order = pickle.loads(data)
    memory = mmap.mmap(file, os.fstat(file).st_size)
    os.close(file)
    serve(order, rank, memory, partial(_check_parent, parent))


def serve(order: Order, rank: int, memory: mmap.mmap, check: Callable[[], object]) -> None:
    """Load a rank's part, and run commands until the command "end"."""
    opened = open_model(order.directory, order.settings, order.model, rank)
    chosen = choose_backend(opened, order.settings)
    backend: Any = chosen.backend
    backend.connect(Exchange(memory, backend.share, check))
    slots = new_slots(opened, backend, order.plan.config)
    part = load_device_part(opened, chosen, order.plan, adapters=slots)
    ready = partial(prepare, part, order.plan, opened.config, use_tqdm=False)
    try:
        Follower(backend, ready, part.forward, part.states, slots).run()
    finally:
        backend.results.leave()


class Follower:
    """Runs the commands of rank 0 in another rank."""

    def __init__(
        self,
        backend: RankBackend,
        prepare: Callable[[], None],
        forward: Callable[[StepBatch], Array],
        states: Any,
        slots: AdapterSlots | None,
    ) -> None:
        self._backend, self._prepare, self._forward = backend, prepare, forward
        self._states, self._slots = states, slots

    def run(self) -> None:
        """Run commands until the command "end"."""
        exchange = self._backend.exchange
        while True:
            try:
                name, arguments = exchange.receive()
                if name == "end":
                    return
                getattr(self, name)(*arguments)
            except Abandoned:
                self._backend.results.leave()
                exchange.rejoin()

    def join(self, invitation: object) -> None:
        """Join the other ranks."""
        self._backend.results.join(invitation, self._backend.exchange.wait)

    def prepare(self) -> None:
        """Compile the code of steps."""
        self._prepare()

    def ready(self) -> None:
        """Do nothing. Rank 0 has waited until this rank has loaded its part."""

    def run_step(self, batch: StepBatch) -> None:
        """Run the rank's part of a step."""
        self._backend.results.run_step(self._forward, batch)

    def move_blocks(self, source: int, target: int, src: Any, dst: Any) -> None:
        """Move the rank's part of blocks, between caches by their numbers."""
        caches = self._backend.caches
        self._backend.inner.move_blocks(caches[source], caches[target], src, dst)

    def export_blocks(self, cache: int, block_ids: Any) -> None:
        """Send the rank's part of blocks to rank 0."""
        self._backend.export_own_blocks(self._backend.caches[cache], block_ids)

    def import_block(self, cache: int, block_id: int, data: bytes) -> None:
        """Write the rank's part of a block."""
        self._backend.import_own_block(self._backend.caches[cache], block_id, data)

    def copy_states(self, src: Any, dst: Any) -> None:
        """Copy recurrent states."""
        self._backend.inner.recurrent.copy_states(self._states, src, dst)

    def import_state(self, slot: int, data: bytes) -> None:
        """Fill a slot with recurrent states."""
        self._backend.inner.recurrent.import_state(self._states, slot, data)

    def put(self, slot: int, changes: Mapping[str, LowRank]) -> None:
        """Fill a slot with the rank's part of an adapter."""
        assert self._slots is not None
        own = self._backend.share.changes(changes, self._backend.model)
        self._slots.put(slot, own)


class RankSlots:
    """The slots of adapters of all ranks, in place of rank 0's own."""

    def __init__(self, slots: AdapterSlots, backend: RankBackend) -> None:
        self._slots, self._backend = slots, backend

    def put(self, slot: int, changes: Mapping[str, LowRank]) -> None:
        """Fill a slot with an adapter's changes by tensor."""
        backend = self._backend
        with backend.command("put", slot, changes):
            self._slots.put(slot, backend.share.changes(changes, backend.model))


def directory_of(directory: Path | GgufHeader) -> Path:
    """Return the path of a model, for a process in another directory."""
    return (directory.path if isinstance(directory, GgufHeader) else directory).absolute()


def _check_parent(parent: int) -> None:
    """End this process if rank 0 has ended."""
    if os.getppid() != parent:
        os._exit(1)
