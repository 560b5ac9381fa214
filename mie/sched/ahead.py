"""What the next step computes, where that is known before this one's tokens are.

A step of decodes is followed by one more token of each sequence that does not end. So the next step
can be launched while this one runs, without its tokens; if a sequence ends by what it drew, its row
was computed in vain.
"""

from collections.abc import Sequence as Items

from mie.memory.manager import KVCacheManager
from mie.sched.sequence import Sequence


def reserve_ahead(manager: KVCacheManager, running: Items[Sequence]) -> None:
    """Have a slot not only for the token that each decode stores, but for the one after it, as far
    as there are blocks. Called before admissions, which pin blocks that are partly filled."""
    for seq in running:
        table = seq.table
        if seq.is_prefilling or table is None or table.num_tokens + 1 != table.num_writable:
            continue
        if goes_on(seq) and not manager.grow(table, table.num_tokens + 2):
            return


def rows_ahead(running: Items[Sequence]) -> tuple[int, ...]:
    """The rows of the step after one in which all of ``running`` decode; none, if one of them has
    no slot yet."""
    tables = [seq.table for seq in running if goes_on(seq) and seq.table is not None]
    if any(table.num_tokens + 2 > table.num_writable for table in tables):
        return ()
    return tuple(sorted(table.row for table in tables))


def goes_on(seq: Sequence) -> bool:
    """Whether the token that is being computed may be followed by another."""
    return seq.num_tokens + 1 < seq.max_tokens
