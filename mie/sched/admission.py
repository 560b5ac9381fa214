"""Find blocks for waiting sequences, and count the sequences that are admitted."""

from mie.memory.manager import KVCacheManager
from mie.memory.prefix import Allocation
from mie.memory.table import Emit
from mie.sched.sequence import Sequence


def find_allocation(manager: KVCacheManager, seq: Sequence, num_reserved: int) -> Allocation | None:
    """Find blocks for a waiting sequence. Return None unless ``num_reserved`` more are left."""
    return manager.find_allocation(
        seq.token_ids,
        salt=seq.request.cache_salt,
        use_cache=seq.may_read_cache,
        host=seq.host,
        num_reserved=num_reserved,
    )


def count_admission(
    seq: Sequence, allocation: Allocation, row: int, manager: KVCacheManager, emit: Emit
) -> None:
    """Count the tokens that an admitted sequence finds in the cache or lost in a preemption."""
    metrics, num_computed = seq.request.metrics, allocation.num_computed
    event = (seq.seq_id, row, seq.num_tokens, num_computed)
    if seq.was_admitted:
        emit(("resume", *event, "recompute" if seq.host is None else "swap"))
        metrics.num_recomputed_tokens += max(0, seq.num_lost - num_computed)
        return
    emit(("admit", *event))
    if not any(each.was_admitted for each in seq.request.sequences):
        metrics.num_cached_tokens = num_computed
        if manager.shares_full and seq.may_read_cache:
            num_full = len(allocation.path) * manager.block_size
            query = (seq.request.num_prompt, num_full, num_computed - num_full)
            manager.stats.add_query(*query)
            if num_computed:
                source = allocation.partial and allocation.partial.block_id
                emit(("hit", seq.seq_id, *query, source))
