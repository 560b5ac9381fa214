"""Predict the next step before the tokens of the current one are known.

After a step of decodes, each sequence that does not end computes one more token. So the next step
can be launched while this one runs, without its tokens. If a sequence turns out to have ended, the
work for its row is discarded.
"""

from collections.abc import Sequence as Items

from mie.memory.manager import KVCacheManager
from mie.sched.sequence import Sequence


def reserve_ahead(manager: KVCacheManager, running: Items[Sequence]) -> None:
    """Reserve slots for each decode's token and the one after it, as far as blocks last.

    Call it before admissions, because they pin blocks that are partly filled.
    """
    for seq in running:
        table = seq.table
        if seq.is_prefilling or table is None or table.num_tokens + 1 != table.num_writable:
            continue
        if goes_on(seq) and not manager.grow(table, table.num_tokens + 2):
            return


def rows_ahead(running: Items[Sequence]) -> tuple[int, ...]:
    """Return the rows of the step after one in which all of ``running`` decode.

    The result is empty if one of them has no slot yet.
    """
    tables = [seq.table for seq in running if goes_on(seq) and seq.table is not None]
    if any(table.num_tokens + 2 > table.num_writable for table in tables):
        return ()
    return tuple(sorted(table.row for table in tables))


def goes_on(seq: Sequence) -> bool:
    """Whether the token that is being computed can be followed by another."""
    return seq.num_tokens + 1 < seq.max_tokens
