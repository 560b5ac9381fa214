"""Make the batch of one step, for tests of operators and backends."""

from typing import Any

import numpy as np

from mie.ops.backend import StepBatch


def step_batch(
    sequences: list[tuple[int, int]], block_size: int, num_blocks: int, seed: int = 0
) -> StepBatch:
    """Return a batch of sequences, each (number of queries, length), in random blocks.

    Past the end of a sequence, its table has stale ids and numbers that are no blocks. They must
    have no effect.
    """
    rng = np.random.default_rng(seed)
    free = rng.permutation(num_blocks).tolist()
    needed = [-(-length // block_size) for _, length in sequences]
    tables = rng.choice([0, -7, num_blocks + 3, 1 << 40], (len(sequences), max(needed) + 1))
    positions, slots = [], []
    for row, (num_queries, length) in enumerate(sequences):
        tables[row, : needed[row]] = [free.pop() for _ in range(needed[row])]
        each = np.arange(length - num_queries, length)
        positions.append(each)
        slots.append(tables[row, each // block_size] * block_size + each % block_size)
    starts = np.array([0, *np.cumsum([num_queries for num_queries, _ in sequences])])
    return StepBatch(
        token_ids=np.zeros(starts[-1], np.int64),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        cu_seqlens_q=starts,
        seq_lens=np.array([length for _, length in sequences]),
        block_tables=tables,
        logits_rows=starts[1:] - 1,
    )


def partial_batch(**fields: Any) -> StepBatch:
    """Return a batch with these fields, in which all others are empty."""
    names = ("token_ids", "positions", "slot_mapping", "cu_seqlens_q", "seq_lens")
    empty = dict.fromkeys((*names, "block_tables", "logits_rows"), np.empty(0, np.int64))
    return StepBatch(**(empty | fields))
