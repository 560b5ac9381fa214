"""Find the rows of the step after a step of decodes, before the tokens of this one are known.

Each sequence that does not end computes one more token. If a sequence turns out to have ended, the
work for the sequence's row is discarded. `mie.engine.overlap` launches the step.
"""

from collections.abc import Sequence as Items

from mie.memory.manager import KVCacheManager
from mie.sched.sequence import Sequence


def reserve_ahead(running: Items[Sequence], manager: KVCacheManager) -> None:
    """Reserve slots for each decode's token and the next token, as far as blocks last.

    Call it before admissions, because they pin blocks that are partly filled.
    """
    for seq in running:
        table = seq.table
        if seq.is_prefilling or table is None or table.num_tokens + 1 != table.num_writable:
            continue
        if seq.may_continue and not manager.grow(table, table.num_tokens + 2):
            return


def rows_ahead(running: Items[Sequence]) -> tuple[int, ...]:
    """Return the rows of the next step, after a step in which all sequences decode.

    The result is empty if a sequence has no slot yet.
    """
    tables = [seq.table for seq in running if seq.may_continue and seq.table is not None]
    if any(table.num_tokens + 2 > table.num_writable for table in tables):
        return ()
    return tuple(sorted(table.row for table in tables))
