"""Keep the blocks of preempted sequences on the host, under ``preemption_mode="swap"``."""

from mie.memory.manager import KVCacheManager
from mie.memory.table import BlockTable
from mie.sched.sequence import Sequence


def swap_out(seq: Sequence, table: BlockTable, manager: KVCacheManager) -> str:
    """Swap out a preempted sequence if the host has room, and return the mode."""
    seq.host = manager.swap_out(table)
    if seq.host is None:
        return "recompute: host pool full"
    seq.request.metrics.num_swaps += 1
    seq.num_lost = 0
    return "swap"


def drop_host(seq: Sequence, manager: KVCacheManager) -> None:
    """Discard the blocks of a swapped-out sequence."""
    if seq.host is not None:
        manager.host.drop(seq.host)
        seq.host = None
