"""Divide a step's batch among groups of layers that have block tables of their own."""

from collections.abc import Sequence
from dataclasses import replace

from mie.ops.backend import StepBatch


def by_group(batch: StepBatch) -> Sequence[StepBatch]:
    """Return the batch of each group, with its own rows of slots and tables."""
    if batch.num_groups == 1:
        return [batch]
    num_tokens, num_seqs = len(batch.token_ids), len(batch.seq_lens)
    return [
        replace(
            batch,
            slot_mapping=batch.slot_mapping[group * num_tokens : (group + 1) * num_tokens],
            block_tables=batch.block_tables[group * num_seqs : (group + 1) * num_seqs],
            num_groups=1,
            group=group,
        )
        for group in range(batch.num_groups)
    ]
