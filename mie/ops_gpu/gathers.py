"""Gather the results of ranks on GPUs with NCCL. Each rank is a process with one GPU.

NCCL gathers buffers of one size, one after the other. A kernel of `rank_parts.cu` then puts the
parts side by side. Gathers are launches in the backend's stream, and are captured in the graph of
a step with the kernels. All ranks run the same steps, so they capture and replay the same gathers.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.errors import ConfigError, WorkerError
from mie.ops.backend import Array, Backend, Progress, StepBatch, StepSize
from mie.ops_gpu.arena import Empty
from mie.ops_gpu.arrays import block_threads, kernel_type, next_power_of_two
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.queue import Queue
from mie.ops_gpu.steps import Steps

PIECE_BYTES = 64 << 20
"""Maximum size of the parts of all ranks in a gather. Longer results are gathered in pieces."""
SECONDS_TO_EXPLAIN = 5.0
"""Seconds in which the reason of a failed gather is expected: another rank that has ended."""

Forward = Callable[[StepBatch], Array]


class Ranks(NamedTuple):
    """A rank among others, and the number of tokens that they know together."""

    rank: int
    num_ranks: int
    vocab_size: int


class Exchange(Protocol):
    """The other ranks, as `mie.ranks.exchange.Exchange` has them."""

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until a function returns true."""

    def expect(self, seconds: float) -> None:
        """Raise the reason for which a command cannot go on, if it shows in so many seconds."""


class Gathers:
    """The `mie.ranks.results.Results` of a GPU."""

    def __init__(
        self,
        backend: Backend,
        launcher: Launcher,
        queue: Queue,
        steps: Steps,
        empty: Empty,
        nccl: Any,
        ranks: Ranks,
    ) -> None:
        """Gather with the module ``nccl`` for a backend, with its parts."""
        self._backend, self._launcher, self._queue = backend, launcher, queue
        self._steps, self._empty, self._nccl = steps, empty, nccl
        self._rank, self._num_ranks, self._vocab_size = ranks
        self._communicator: Any = None
        self._abort: Callable[[], object] = _nothing
        self._exchange: Exchange

    # Joining and leaving.

    def host_bytes(self, widest: int) -> int:
        return 0

    def connect(self, exchange: Any) -> None:
        self._exchange = exchange
        self._queue.wait = self._wait

    def invite(self) -> object | None:
        return None if self._communicator is not None else self._nccl.get_unique_id()

    def join(self, invitation: Any, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Make a communicator. NCCL waits for the other ranks, so this happens in a thread.

        If a rank ends meanwhile, the thread is left alone.

        Raises:
            WorkerError: NCCL failed.
        """
        made: list[Any] = []

        def make() -> None:
            try:
                with self._queue.device:
                    args = self._num_ranks, invitation, self._rank
                    made.append(self._nccl.NcclCommunicator(*args))
            except Exception as error:
                made.append(error)

        thread = threading.Thread(target=make, name="mie-nccl", daemon=True)
        thread.start()
        wait(lambda: not thread.is_alive())
        [communicator] = made
        if isinstance(communicator, Exception):
            raise self._failed(communicator) from communicator
        self._communicator = communicator
        self._abort = weakref.finalize(self, communicator.abort)

    def leave(self) -> None:
        """End the gathers that run, and forget the graphs that have some."""
        self._steps.forget()
        self._abort()
        self._communicator = None

    def _failed(self, error: Exception) -> WorkerError:
        """Return an error of NCCL or CUDA, or raise its reason, if another rank is the reason."""
        self._exchange.expect(SECONDS_TO_EXPLAIN)
        return WorkerError(f"rank {self._rank} of {self._num_ranks} failed: {error}")

    # Steps.

    def step_bytes(self, size: StepSize) -> int:
        """Return the bytes of a step. Captured steps may keep the buffers before the last."""
        widest = max(self._vocab_size, size.hidden_size, size.intermediate_size)
        row = next_power_of_two(self._num_ranks * self._backend.weight_bytes((widest,)))
        return self._backend.step_bytes(size) + 2 * max(PIECE_BYTES, row)

    def prepare(self, progress: Progress, forward: Forward, size: StepSize) -> None:
        with self._ended_with_ranks():
            self._backend.prepare(progress, self._with_logits(forward), size)

    def run_step(self, forward: Forward, batch: StepBatch) -> Array:
        with self._ended_with_ranks():
            return self._backend.run_step(self._with_logits(forward), batch)

    def _with_logits(self, forward: Forward) -> Forward:
        return lambda batch: self.whole(forward(batch), self._vocab_size)

    @contextmanager
    def _ended_with_ranks(self) -> Iterator[None]:
        """Wait for the GPU at the end, so that no gather runs outside of a command.

        Without the other ranks, a gather would never end. So an error ends all gathers.

        Raises:
            WorkerError: another rank has ended, or NCCL or CUDA failed.
        """
        try:
            yield
            self._queue.mark()()
        except WorkerError:
            self.leave()
            raise
        except RuntimeError as error:
            failed = self._failed(error)
            self.leave()
            raise failed from error

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for the GPU, and check meanwhile whether all ranks run."""

        def has_ended() -> bool:
            if self._communicator is not None:
                self._communicator.check_async_error()
            return is_done()

        self._exchange.wait(has_ended)

    # Results.

    def embed(self, token_ids: Array, embedding: Array, scale: float) -> Array:
        num_ranks, vocab_size = self._num_ranks, self._vocab_size
        first, last = (vocab_size * rank // num_ranks for rank in (self._rank, self._rank + 1))
        rows = self._empty("own rows", token_ids.shape, np.dtype(np.int32))
        count, threads = len(token_ids), block_threads(len(token_ids))
        kernel = self._launcher.kernel("rank_parts.cu", "own_rows")
        sizes = (np.int32(n) for n in (count, first, last))
        kernel((ceil_div(count, threads),), (threads,), (token_ids, rows, *sizes))
        x = self._backend.embed(rows, embedding, scale)
        out = self._empty("embedded", x.shape, x.dtype)
        for piece in self._pieces(x, x.shape[1]):
            parts = self._gather(x[piece], 0, x.shape[1], x.shape[1])
            args = parts, token_ids[piece], out[piece]
            grid, block = (piece.stop - piece.start,), (block_threads(x.shape[1]),)
            numbers = (np.int32(n) for n in (x.shape[1], vocab_size, num_ranks))
            self._kernel("pick_rows", x)(grid, block, (*args, *numbers))
        return out

    def whole(self, x: Array, width: int, added: Array | None = None) -> Array:
        return self._whole(x, 0, x.shape[1], width, self._num_ranks, added)

    def own(self, x: Array, width: int) -> Array:
        out = self._empty(f"own {width}", (len(x), width), x.dtype)
        self._copy(x, x.shape[1] * self._rank // self._num_ranks, out, 0, width)
        return out

    def columns(self, x: Array, first: int, own: range, width: int) -> Array:
        return self._whole(x, first, len(own), width, width // len(own))

    def replace(self, x: Array, first: int, own: range, y: Array) -> Array:
        """Replace the columns of x itself."""
        self._copy(y, own.start, x, first, len(own))
        return x

    def _whole(
        self,
        x: Array,
        first: int,
        num_own: int,
        width: int,
        num_parts: int,
        added: Array | None = None,
    ) -> Array:
        """Gather ``num_own`` columns of x from ``first`` on, and put the ranks' side by side.

        ``added`` is overwritten.
        """
        out = added
        if out is None:
            out = self._empty(f"whole {width} of {num_own}", (len(x), width), x.dtype)
        part, threads = ceil_div(width, num_parts), block_threads(width)
        numbers = width, part, num_parts, self._num_ranks // num_parts, added is not None
        for piece in self._pieces(x, part):
            parts = self._gather(x[piece], first, num_own, part)
            grid = piece.stop - piece.start, ceil_div(width, threads)
            args = parts, out[piece], *map(np.int32, numbers)
            self._kernel("take_parts", x)(grid, (threads,), args)
        return out

    def _pieces(self, x: Array, part: int) -> Iterator[slice]:
        """Yield rows of x [T, …] of which the ranks' parts fit a buffer."""
        size = max(1, PIECE_BYTES // (self._num_ranks * part * x.dtype.itemsize))
        for begin in range(0, len(x), size):
            yield slice(begin, min(begin + size, len(x)))

    def _gather(self, x: Array, first: int, width: int, part: int) -> Array:
        """Return some columns of x [T, …] from all ranks: [ranks, T, part].

        If x is not just these columns, they are first copied to their place.
        """
        shape = self._num_ranks, len(x), part
        parts = self._empty("parts", (self._num_ranks * len(x) * part,), x.dtype).reshape(shape)
        mine = x
        if x.shape[1] != part:
            mine = parts[self._rank]
            self._copy(x, first, mine, 0, width)
        if self._launcher.is_listing:
            return parts
        queue, num_bytes = self._queue, len(x) * part * x.dtype.itemsize
        given = num_bytes, self._nccl.NCCL_INT8, queue.address  # bytes, of which every dtype is
        self._communicator.allGather(queue.address_of(mine), queue.address_of(parts), *given)
        return parts

    def _copy(self, x: Array, first: int, out: Array, to: int, width: int) -> None:
        threads = block_threads(width)
        sizes = (np.int32(n) for n in (x.shape[1], first, out.shape[1], to, width))
        grid = len(x), ceil_div(width, threads)
        self._kernel("copy_columns", x)(grid, (threads,), (x, out, *sizes))

    def _kernel(self, name: str, x: Array) -> Any:
        return self._launcher.kernel("rank_parts.cu", f"{name}<{kernel_type(x)}>")


def _nothing() -> None:
    """Stand in for the end of a communicator that does not exist."""


def nccl_of(cupy: Any, rank: int, num_ranks: int) -> Any:
    """Return CuPy's NCCL, and make the rank's GPU the thread's current device.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or this CuPy has no NCCL.
    """
    count = cupy.cuda.runtime.getDeviceCount()
    if count < num_ranks:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}; each rank needs a GPU, and CuPy finds {count} "
            "(choose fewer ranks, or let CUDA_VISIBLE_DEVICES name more GPUs)"
        )
    try:
        nccl = cupy.cuda.nccl
        nccl.get_version()
    except (AttributeError, ImportError, RuntimeError) as error:
        version = cupy.cuda.runtime.runtimeGetVersion() // 1000
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}; GPUs exchange results with NCCL, which this "
            f"CuPy cannot load: {str(error).splitlines()[0]} (pip install nvidia-nccl-cu{version}, "
            "or leave it out)"
        ) from error
    cupy.cuda.Device(rank).use()
    return nccl
