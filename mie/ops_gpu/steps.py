"""Run a step on the device: copy its integers at once, and run the forward pass as a graph.

A step is padded to a size that many steps share (`Bucket`). The first step of a
size runs eagerly, to compile its kernels and allocate its results. The second is captured. From
then on the host queues the copies, the graph, and the sampling.

Block tables have no size of their own. Their rows are wide on the device, and the host copies only
the columns that a step uses.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.backend import Array, StepBatch
from mie.ops_gpu.arena import Arena
from mie.ops_gpu.arrays import block_threads, next_power_of_two
from mie.ops_gpu.batch import Bucket, DeviceBatch, bucket_of, host_batch, padded, without_states
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.queue import Queue, Task
from mie.ops_gpu.staging import Staging

MAX_GRAPHS, MAX_CHUNK_GRAPHS = 64, 16
"""Maximum number of captured steps of decodes, and of steps with chunks of prompts.

The least recently used step makes room for another of its kind, and counts as new afterwards.

Steps of the common sizes fit. A graph takes device memory for every launch. CUDA frees a running
graph when it has ended.
"""

TABLE_WIDTH = 1024
"""Number of blocks in a row of the device's tables, until a sequence has more.

They take 4 KB a sequence. If a sequence has more, steps are captured again.
"""

_NOTHING = np.zeros(0, np.int64)
NO_SEQUENCES = StepBatch(
    token_ids=_NOTHING,
    positions=_NOTHING,
    slot_mapping=_NOTHING,
    cu_seqlens_q=np.zeros(1, np.int64),
    seq_lens=_NOTHING,
    block_tables=np.zeros((0, 1), np.int64),
    logits_rows=_NOTHING,
)

Forward = Callable[[StepBatch], Array]


LAUNCHES = ("never captured", "new", "captured", "replayed")
"""How steps are launched.

The first two are launched kernel by kernel: for good, or as the first step of their size. The
others are graphs, captured in this step or in an earlier one.
"""


class StepKind(NamedTuple):
    """Steps that are counted together."""

    has_chunks: bool
    """Whether they have chunks of prompts."""
    launch: str
    """One of `LAUNCHES`."""


class CapturedStep(NamedTuple):
    """A graph of a forward pass, and the memory that it reads and writes."""

    launch: Task
    batch: DeviceBatch
    logits: Array
    buffers: tuple[Array, ...]


class Steps:
    """Runs forward passes.

    With ``enforce_eager`` nothing is captured. The same kernels then run on the same padded batch
    and give the same bits.
    """

    def __init__(
        self,
        launcher: Launcher,
        queue: Queue,
        *,
        enforce_eager: bool,
        follows_lengths: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take whether launches depend on a step's maximum length as ``follows_lengths``."""
        self.is_running = False
        """Whether a forward pass is being launched or captured."""
        self.has_states = False
        """Whether sequences have recurrent states. Steps of no sequences have none."""
        self.has_adapters = False
        """Whether matrices have slots of adapters."""
        self.adapters: Array | None = None
        """The slots of the tokens of the running step [T], if matrices have any."""
        self.counts: Counter[StepKind] = Counter()
        """The number of steps of each kind so far."""
        self.arena = Arena(launcher.xp)
        self._launcher = launcher
        self._queue = queue
        self.enforces_eager = enforce_eager
        """Whether nothing is captured."""
        self.most_tokens: int | None = None
        """Maximum number of tokens of a padded step, once it is known."""
        self._follows = follows_lengths
        self._table_width = TABLE_WIDTH
        self._staging = Staging(queue)
        self._warm: set[Bucket] = set()
        self._captured: dict[Bucket, CapturedStep] = {}

    @property
    def follows_lengths(self) -> bool:
        """Whether launches depend on a step's maximum length."""
        return self._follows()

    def forget(self) -> None:
        """Forget the captured steps, and which steps have run."""
        self._captured.clear()
        self._warm.clear()

    def run(self, forward: Forward, batch: StepBatch) -> Array:
        """Return the logits [R, V] of the batch. They last until the next step."""
        bucket = bucket_of(
            batch, follows_lengths=self.follows_lengths, most_tokens=self.most_tokens
        )
        if bucket is None:
            return self.launch_prompt(forward, batch)
        num_rows, table_width = len(batch.logits_rows), batch.block_tables.shape[1]
        if table_width > self._table_width:
            self._table_width = next_power_of_two(table_width)
            self._captured.clear()
        return self._run(forward, padded(batch, bucket), bucket)[:num_rows]

    def launch_prompt(self, forward: Forward, batch: StepBatch) -> Array:
        """Return the logits of a step that is never captured."""
        has_chunks = batch.num_decodes is None or len(batch.seq_lens) > batch.num_decodes
        self.counts[StepKind(has_chunks, "never captured")] += 1
        return self._launch(forward, self._upload(batch, None, None))

    def launch_empty(self, forward: Forward, bucket: Bucket, num_groups: int = 1) -> Array:
        """Launch a step of empty sequences, and return its logits [S, V]."""
        batch = padded(replace(NO_SEQUENCES, num_groups=num_groups), bucket)
        return self._launch(forward, self._upload(batch, bucket, None))

    def run_empty(self, forward: Forward, bucket: Bucket, num_groups: int = 1) -> Array:
        """Run and capture a step of empty sequences, and return its logits [S, V]."""
        batch = padded(replace(NO_SEQUENCES, num_groups=num_groups), bucket)
        for _ in range(2):  # the first run may still allocate
            logits = self._run(forward, batch, bucket)
        return logits

    def _run(self, forward: Forward, batch: StepBatch, bucket: Bucket) -> Array:
        """Run a padded step, eagerly the first time of its size, and then as a graph."""
        captured = self._captured.pop(bucket, None)
        launch = "new" if captured is None else "replayed"
        if captured is not None:
            self._captured[bucket] = captured  # the last one: the most recently used
        device_batch = self._upload(batch, bucket, captured)
        if captured is None and bucket in self._warm and not self.enforces_eager:
            captured = self._capture(forward, device_batch)
            self._make_room(has_chunks=bucket.num_chunks > 0)
            self._captured[bucket], launch = captured, "captured"
        if self.enforces_eager:
            launch = "never captured"
        self.counts[StepKind(bucket.num_chunks > 0, launch)] += 1
        if captured is None:
            logits = self._launch(forward, device_batch)
            self._warm.add(bucket)
        else:
            captured.launch()
            logits = captured.logits
        return logits

    def _make_room(self, *, has_chunks: bool) -> None:
        """Forget the least recently used step of a kind if there are as many as allowed."""
        kind = [each for each in self._captured if (each.num_chunks > 0) == has_chunks]
        if len(kind) == (MAX_CHUNK_GRAPHS if has_chunks else MAX_GRAPHS):
            del self._captured[kind[0]]
            self._warm.discard(kind[0])

    def _upload(
        self, batch: StepBatch, bucket: Bucket | None, captured: CapturedStep | None
    ) -> DeviceBatch:
        """Upload the batch, to the memory of a captured step or to new memory."""
        if self.has_states and batch.slots is None:
            batch = without_states(batch)
        if self.has_adapters and batch.adapters is None:
            batch = replace(batch, adapters=np.zeros_like(batch.token_ids))
        if bucket is None:
            host = host_batch(batch)
        else:
            host = host_batch(batch, bucket.max_len, bucket.num_chunk_tokens)
        if captured is None:
            table_width = host.table_width if bucket is None else self._table_width
            shape = (host.size(table_width),)
            integers = self.arena.empty("integers", shape, np.dtype(np.int32))
            device_batch = host.on_device(integers)
        else:
            device_batch = captured.batch
        self._staging.upload(host.parts, *device_batch.destinations(host.table_width))
        if batch.drawn is not None:
            self._take_tokens(batch.drawn.token_ids, device_batch)
        return device_batch

    def _take_tokens(self, drawn: Array, batch: DeviceBatch) -> None:
        num_tokens = len(batch.token_ids)
        threads = block_threads(num_tokens)
        kernel = self._launcher.kernel("take_tokens.cu", "take_tokens")
        args = (drawn, batch.drawn_rows, batch.token_ids, np.int32(num_tokens))
        kernel((ceil_div(num_tokens, threads),), (threads,), args)

    def _capture(self, forward: Forward, batch: DeviceBatch) -> CapturedStep:
        launch, logits = self._queue.capture(lambda: self._launch(forward, batch))
        return CapturedStep(launch, batch, logits, self.arena.buffers)

    def _launch(self, forward: Forward, batch: DeviceBatch) -> Array:
        self.is_running, self.adapters = True, batch.adapters if self.has_adapters else None
        try:
            return forward(batch)
        finally:
            self.is_running, self.adapters = False, None
