"""Compute tokens and log-probabilities from logits on the device.

Several blocks share each row. All rows of a step, greedy or random, go through the same kernels,
128 rows at a time, and kernels that none of them needs are not launched. Their ids are copied back
at once, and only waited for when they are needed. The rows' controls travel to the device in one
buffer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops import sampling
from mie.ops.backend import Array
from mie.ops.sampling import RowControls
from mie.ops.token_weights import lowest_kept_z, scale_of
from mie.ops_gpu.arena import Arena
from mie.ops_gpu.arrays import block_threads, element_type, kernel_type, next_power_of_two, to_host
from mie.ops_gpu.cubins import KernelName
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.queue import Queue, no_wait
from mie.ops_gpu.staging import Staging

MAX_ROWS = 128
"""Number of rows in one launch.

The scratch takes at most 160 MB for a vocabulary of 150,000.
"""

PART, SEGMENT, NUM_BINS, PART_THREADS, CHOOSING_THREADS = 8192, 1024, 2048, 256, 512
"""Constants of sampling.cuh and choose_tokens.cu. Both files explain them."""

NUM_UNREAD = 2
"""Number of steps with unread ids: a running step, and a step queued behind it.

The second reads the first one's ids on the device, so the two do not share memory.
"""

MAX_TOP = 32
"""Maximum number of log-probabilities found on the device, each by a pass over the row.

OpenAI's API allows at most 20.
"""

MAX_TOP_K = 2**31 - 1
"""Largest value of the kernel's integer, and more than any vocabulary has."""

KINDS = {"greedy": 0, "drawn": 1, "forced": 2}
ALL, IDS, WORDS = 0, 1, 2
"""Forms of a row's allowed tokens: all of them, a list of ids, or words of bits."""

_DOUBLES = ("top_p", "uniform", "repetition_penalty")
_FLOATS = ("scale", "largest_t")
_INTEGERS = (
    *("kind", "top_k", "forced_id", "edited_row", "drawn_row"),
    *("bias", "allowed", "banned", "seen", "output", "end"),
    *("value_begin", "allowed_form"),
)

ROW = np.dtype(
    [
        *((name, np.float64) for name in _DOUBLES),
        *((name, np.float32) for name in _FLOATS),
        *((name, np.int32) for name in _INTEGERS),
    ],
    align=True,
)
"""``struct Row`` of sampling.cuh. The file explains the fields."""

_NO_IDS = np.zeros(0, np.int32)


class Controls(NamedTuple):
    """The controls of some rows, and how many of these need scratch memory.

    The arrays are parts of one buffer. They are None if every row is plain greedy.
    """

    rows: Array | None = None  # bytes: `ROW` for each row
    values: Array | None = None  # float64
    ids: Array | None = None  # int32
    num_edited: int = 0
    num_drawn: int = 0


@dataclass(frozen=True, eq=False)
class Drawn:
    """Token ids on the device, on their way to the host."""

    token_ids: Array
    on_host: NDArray[np.int32]
    slot: "_Slot"
    turn: int


class _Slot:
    """The memory of a step's ids, not reused before they are read."""

    def __init__(self, xp: Any, queue: Queue) -> None:
        self._xp = xp
        self._queue = queue
        self.wait = no_wait
        """Waits until the last ids are on the host."""
        self.token_ids: Array = xp.empty(0, np.int32)
        self.on_host = np.zeros(0, np.int32)
        self.turn = 0

    def grow(self, size: int) -> None:
        """Make space for this many ids. Earlier ids stay valid for those who refer to them."""
        self.wait()
        self.token_ids = self._xp.empty(size, np.int32)
        self.on_host = self._queue.host_memory(4 * size).view(np.int32)


class Sampler:
    """Samples tokens on the device. Up to `NUM_UNREAD` steps may be unread at a time."""

    def __init__(self, launcher: Launcher, queue: Queue) -> None:
        self._launcher = launcher
        self._queue = queue
        self._arena = Arena(launcher.xp)
        self._staging = Staging(queue)
        self._slots = [_Slot(launcher.xp, queue) for _ in range(NUM_UNREAD)]
        self._turn = 0

    def start(self, logits: Array, rows: Sequence[RowControls]) -> Drawn:
        """Begin `ops.sampling.sample` without waiting for the result."""
        num_rows = len(logits)
        drawn = self._take_slot(num_rows)
        controls = self._controls(rows)
        for start in range(0, num_rows, MAX_ROWS):
            part = slice(start, min(start + MAX_ROWS, num_rows))
            table = None if controls.rows is None else controls.rows[ROW.itemsize * start :]
            self._launch(
                logits[part], controls._replace(rows=table), rows[part], drawn.token_ids[part]
            )
        self._queue.download(drawn.token_ids, drawn.on_host)
        drawn.slot.wait = self._queue.mark()
        return drawn

    def finish(self, drawn: Drawn) -> list[int]:
        """Wait for the ids of `start` and return them."""
        assert drawn.slot.turn == drawn.turn, "read too late: the slot was reused"
        drawn.slot.wait()
        chosen: list[int] = drawn.on_host.tolist()
        return chosen

    def _take_slot(self, num_rows: int) -> Drawn:
        self._turn += 1
        slot = self._slots[self._turn % NUM_UNREAD]
        slot.turn = self._turn
        if len(slot.on_host) < num_rows:
            for each in self._slots:  # all at once, so that the next steps need no more
                each.grow(next_power_of_two(num_rows))
        return Drawn(slot.token_ids[:num_rows], slot.on_host[:num_rows], slot, slot.turn)

    def _controls(self, rows: Sequence[RowControls]) -> Controls:
        """Copy the rows' controls to the device, in one buffer."""
        if all(_is_plain(row) for row in rows):
            return Controls()
        packed = pack(rows)
        parts = [np.asarray(part).view(np.uint8) for part in packed[:3]]
        rows_end, values_end, size = accumulate(map(len, parts))
        buffer = self._arena.empty("controls", (size,), np.dtype(np.uint8))
        self._staging.upload(parts, buffer)
        return packed._replace(
            rows=buffer[:rows_end],
            values=buffer[rows_end:values_end].view(np.float64),
            ids=buffer[values_end:].view(np.int32),
        )

    def _launch(
        self, logits: Array, controls: Controls, rows: Sequence[RowControls], token_ids: Array
    ) -> None:
        """Launch the kernels for at most `MAX_ROWS` rows of logits [R, V]. See sampling.cuh."""
        num_rows, vocab_size = logits.shape
        num_parts, num_segments = ceil_div(vocab_size, PART), ceil_div(vocab_size, SEGMENT)
        grid, size = (num_parts, num_rows), np.int32(vocab_size)
        table = controls.rows
        bests = self._scratch("bests", (num_rows, num_parts, 2), np.int32)
        edited = self._scratch("edited", (controls.num_edited, vocab_size), np.float32)
        masses = self._scratch("masses", (controls.num_drawn, num_parts), np.uint64)
        bins = self._scratch("bins", (controls.num_drawn, NUM_BINS), np.uint64)
        counts = self._scratch("counts", (controls.num_drawn, num_segments), np.int32)
        lists = self._scratch("lists", (controls.num_drawn, vocab_size), np.int32)

        def launch(name: str, grid: tuple[int, ...], threads: int, *args: Array | None) -> None:
            kernel = self._launcher.kernel(f"{name}.cu", f"{name}<{kernel_type(logits)}>")
            kernel(grid, (threads,), (logits, table, *args, size))

        if any(map(_is_edited, rows)):
            launch("edit_logits", grid, PART_THREADS, controls.ids, controls.values, edited)
        launch("find_largest", grid, PART_THREADS, edited, bests, bins)
        drawn = [row for row in rows if _is_drawn(row)]
        found = (edited, bests, masses, bins)
        if drawn:
            launch("weigh_tokens", grid, PART_THREADS, *found)
        if any(_is_cut(row, vocab_size) for row in drawn):
            launch("keep_candidates", grid, PART_THREADS, *found, counts, lists)
        outputs = (edited, bests, masses, counts, lists, token_ids)
        launch("choose_tokens", (num_rows,), CHOOSING_THREADS, *outputs)

    def _scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array | None:
        """Return an uninitialised array, or None if it is empty."""
        return self._arena.empty(name, shape, np.dtype(dtype)) if math.prod(shape) else None


def top_logprobs(
    launcher: Launcher, logits: Array, token_id: int, num_top: int
) -> tuple[list[int], list[float], int]:
    """Compute `ops.sampling.top_logprobs` of one row [V], on the host if more than `MAX_TOP`."""
    vocab_size = len(logits)
    if not 0 <= num_top <= MAX_TOP:
        return sampling.top_logprobs(to_host(logits), token_id, num_top)
    num_top = min(num_top, vocab_size)
    result = launcher.xp.empty(2 + 2 * num_top, np.float64)
    kernel = launcher.kernel(*kernel_of_logprobs(logits.dtype))
    numbers = (np.int32(n) for n in (vocab_size, token_id, num_top))
    kernel((1,), (_threads(vocab_size),), (logits, result, *numbers))
    rank, logprob, *top = to_host(result).tolist()
    others = zip(map(int, top[:num_top]), top[num_top:], strict=True)
    kept = [(token_id, logprob), *((i, value) for i, value in others if i != token_id)]
    return [i for i, _ in kept], [value for _, value in kept], int(rank)


def kernel_of_logprobs(dtype: np.dtype[Any]) -> KernelName:
    """Return the kernel of `top_logprobs` for logits of this dtype."""
    return KernelName("top_logprobs.cu", f"top_logprobs<{element_type(dtype)}>")


def _threads(vocab_size: int) -> int:
    return block_threads(vocab_size // 8, most=512)


def _is_plain(row: RowControls) -> bool:
    """Return whether the row's token is the largest of its unedited logits."""
    return row.temperature == 0.0 and not row.edits_logits and row.forced_id is None


def _is_edited(row: RowControls) -> bool:
    return row.forced_id is None and row.edits_logits


def _is_drawn(row: RowControls) -> bool:
    return row.forced_id is None and row.temperature > 0.0


def _is_cut(row: RowControls, vocab_size: int) -> bool:
    return 0 < row.top_k < vocab_size or row.top_p < 1.0


def pack(rows: Sequence[RowControls]) -> Controls:
    """Return the rows' controls on the host, with their lists concatenated."""
    table: list[tuple[float, ...]] = []
    ids: list[NDArray[Any]] = []
    values: list[NDArray[Any]] = []
    num_ids = num_values = num_edited = num_drawn = 0
    for row in rows:
        is_edited, is_drawn = _is_edited(row), _is_drawn(row)
        # Places in the scratch memory are different for all rows of one launch.
        edited_row = num_edited % MAX_ROWS if is_edited else -1
        drawn_row = num_drawn % MAX_ROWS if is_drawn else -1
        num_edited += is_edited
        num_drawn += is_drawn
        begins, value_begin = [num_ids] * 6, num_values
        if is_edited:
            lists, added = _id_lists(row), _values(row)
            begins = list(accumulate(map(len, lists), initial=num_ids))
            ids += lists
            values += added
            num_ids, num_values = begins[-1], num_values + sum(map(len, added))
        places = (edited_row, drawn_row, *begins, value_begin)
        table.append((*_numbers(row), *places, _allowed_form(row)))
    return Controls(
        np.array(table, ROW),  # at once: setting fields of an array takes five times as long
        np.concatenate([np.zeros(0), *values]),
        np.concatenate([np.zeros(0, np.int32), *ids], dtype=np.int32, casting="unsafe"),
        min(num_edited, MAX_ROWS),
        min(num_drawn, MAX_ROWS),
    )


def _numbers(row: RowControls) -> tuple[float, ...]:
    """Return the fields of `ROW` that depend on the row alone, in their order."""
    kind = "greedy" if row.temperature == 0.0 else "drawn"
    return (
        row.top_p,
        row.uniform,
        row.repetition_penalty,
        scale_of(row.temperature) if row.temperature > 0.0 else 0.0,
        -lowest_kept_z(row.min_p),
        KINDS[kind if row.forced_id is None else "forced"],
        min(row.top_k, MAX_TOP_K),
        row.forced_id or 0,
    )


def _allowed_form(row: RowControls) -> int:
    if row.allowed is not None:
        return WORDS
    return ALL if row.allowed_ids is None else IDS


def _id_lists(row: RowControls) -> list[NDArray[Any]]:
    """Return the ids (or words of bits) of the row's edits, in the order of ``struct Row``."""
    has_counts = row.output_ids is not None and row.output_counts is not None
    lists = (
        None if row.bias is None else row.bias[0],
        row.allowed_ids if row.allowed is None else row.allowed.words(),
        row.banned_ids,
        row.seen_ids,
        row.output_ids if has_counts else None,
    )
    return [_NO_IDS if listed is None else listed for listed in lists]


def _values(row: RowControls) -> list[NDArray[Any]]:
    """Return the bias of its ids, and the penalties of the output ids."""
    values: list[NDArray[Any]] = []
    if row.bias is not None:
        values.append(row.bias[1])
    if row.output_ids is not None and row.output_counts is not None:
        values.append(row.presence_penalty + row.frequency_penalty * row.output_counts)
    return values
