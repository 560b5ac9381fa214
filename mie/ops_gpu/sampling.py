"""Tokens from logits on the device.

Greedy rows are chosen on the device, and a few bytes come back. For now every other row (a
temperature, penalties, a bias, a mask) is copied to the host and goes through the NumPy operator
in float64: a draw is then the same on every backend, given the same logits.
"""

from collections.abc import Sequence

import numpy as np

from mie.ops import sampling
from mie.ops.backend import Array
from mie.ops.sampling import RowControls
from mie.ops_gpu.arrays import block_threads, kernel_type, to_host
from mie.ops_gpu.launcher import Launcher


def sample(launcher: Launcher, logits: Array, rows: Sequence[RowControls]) -> list[int]:
    """`ops.sampling.sample`."""
    own = [r for r, row in enumerate(rows) if row.temperature > 0.0 or row.edits_logits]
    greedy = argmax(launcher, logits) if len(own) < len(rows) else [0] * len(rows)
    if own:
        copied = to_host(logits[own])
        for r, row_logits in zip(own, copied, strict=True):
            greedy[r] = sampling.sample_row(row_logits, rows[r])
    return [
        token_id if row.forced_id is None else row.forced_id
        for token_id, row in zip(greedy, rows, strict=True)
    ]


def argmax(launcher: Launcher, logits: Array) -> list[int]:
    """The id of the largest logit in each row [R, V], the lowest among equals."""
    num_rows, vocab_size = logits.shape
    ids = launcher.xp.empty(num_rows, np.int32)
    kernel = launcher.kernel("argmax.cu", f"argmax<{kernel_type(logits)}>")
    threads = block_threads(vocab_size // 8, most=1024)
    kernel((num_rows,), (threads,), (logits, ids, np.int32(vocab_size)))
    token_ids: list[int] = to_host(ids).tolist()
    return token_ids
