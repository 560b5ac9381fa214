"""Describe a step to the kernels: its header, and the items of its attention."""

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops.backend import StepBatch, StepSize
from mie.ops.weights.quantised import GROUPS
from mie.ops_jit import layout
from mie.ops_jit.memory import address, padded, zeros
from mie.ops_jit.program import room_for


class StepHeader:
    """The words that `mie.ops_jit.layout` numbers, and the arrays that they point to."""

    def __init__(self) -> None:
        self.words: NDArray[np.int64] = np.zeros(layout.HEADER_WORDS, np.int64)
        self._arrays: dict[int, NDArray[np.int64]] = {}
        self._partials: Floats = np.empty(0, np.float32)

    def point(self, word: int, array: Ints) -> None:
        """Let a word be the address of an array of integers, and keep the array."""
        self._arrays[word] = kept = np.ascontiguousarray(array, np.int64)
        self.words[word] = address(kept)

    def set_batch(self, batch: StepBatch, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Describe a step's batch."""
        self.words[layout.NUM_SEQS] = len(batch.seq_lens)
        self.words[layout.TABLE_WIDTH] = batch.block_tables.shape[1]
        for word, array in (
            (layout.TOKEN_IDS, batch.token_ids),
            (layout.POSITIONS, batch.positions),
            (layout.SLOTS, batch.slot_mapping),
            (layout.STARTS, batch.cu_seqlens_q),
            (layout.LENGTHS, batch.seq_lens),
            (layout.TABLES, batch.block_tables),
            (layout.LOGITS_ROWS, batch.logits_rows),
        ):
            self.point(word, array)
        if batch.slots is not None and batch.fresh is not None:
            self.point(layout.STATE_SLOTS, batch.slots)
            self.point(layout.FRESH, batch.fresh.astype(np.int64))
        self.set_adapters(batch)
        items, merges, num_partials = attention_items(batch, num_heads // num_kv_heads)
        self.words[layout.NUM_ITEMS], self.words[layout.NUM_MERGES] = len(items), len(merges)
        self.point(layout.ITEMS, items)
        self.point(layout.MERGES, merges)
        size = num_partials * num_heads * (16 + padded(head_dim))
        if size > self._partials.size:
            self._partials = zeros((size,), np.float32)
        self.words[layout.PARTIALS] = address(self._partials)

    def set_adapters(self, batch: StepBatch) -> None:
        """Describe the adapters of a step's tokens."""
        if batch.adapters is not None:
            pairs = pairs_of(batch.adapters)
            self.words[layout.NUM_ADAPTED] = len(pairs)
            self.point(layout.ADAPTED, pairs)


def pairs_of(adapters: Ints) -> NDArray[np.int64]:
    """Return [pairs, 2]: each token with an adapter, and the index of its slot, slot by slot."""
    tokens = np.flatnonzero(adapters)
    slots = adapters[tokens] - 1
    order = np.argsort(slots, kind="stable")
    return np.stack([tokens[order], slots[order]], axis=1)


def attention_scratch(group: int, head_dim: int) -> int:
    """Return the bytes that attention needs: a tile's queries, scores and states, and a panel."""
    rows, width = queries_of_item(group) * group, padded(head_dim)
    row_bytes = 4 * head_dim + 4 * layout.KEY_TILE + 2 * (64 + 4 * width)
    return rows * row_bytes + 64 + 64 + 64 * width


def partial_bytes(num_seqs: int, max_len: int, num_heads: int, head_dim: int) -> int:
    """Return the maximum size of the partial results of decodes of at most ``max_len`` tokens."""
    num_parts = ceil_div(max_len, layout.PART)
    num_partials = num_seqs * num_parts if num_parts > 1 else 0
    return num_partials * num_heads * (16 + padded(head_dim)) * 4


def largest_step_bytes(
    size: StepSize, num_threads: int, least_scratch: int, *, rounds_activations: bool = False
) -> int:
    """Return the bytes of a step's buffers, the threads' memory, and attention's parts."""
    cache, hidden, inner = size.cache, size.hidden_size, size.intermediate_size
    queries = size.num_heads * cache.head_dim
    heads = 3 * queries + 2 * cache.num_kv_heads * cache.head_dim
    is_fused = inner % layout.LANES == 0
    of_a_token = 3 * hidden + heads + (inner if is_fused else 3 * inner)
    if size.gates_attention:
        of_a_token += 2 * queries
    of_a_token += size.num_recurrent_results
    if size.num_chosen:  # pairs and items, gathered rows and results, and what is between them
        own = size.expert_size * (1 if size.expert_size % layout.LANES == 0 else 3)
        of_a_token += hidden + size.num_chosen * (16 + 2 * hidden + own)
    of_a_row = 2 * hidden + size.vocab_size
    if rounds_activations:
        of_a_row += rounded(hidden)
        of_a_token += rounded(hidden) + rounded(queries) + rounded(inner)
        of_a_token += size.num_chosen * (rounded(hidden) + rounded(size.expert_size))
    num_results = room_for(size.num_tokens) * of_a_token + room_for(size.num_seqs) * of_a_row
    scratch = max(
        least_scratch, attention_scratch(size.num_heads // cache.num_kv_heads, cache.head_dim)
    )
    partials = partial_bytes(size.num_seqs, size.max_len, size.num_heads, cache.head_dim)
    return 4 * num_results + num_threads * scratch + partials


def rounded(width: int) -> int:
    """Return the most words of a row that is rounded for codes of 4 and of 8 bits."""
    return 2 * layout.rounded_words(width, min(GROUPS))


def queries_of_item(group: int) -> int:
    """Return how many queries of a sequence an item has, with ``group`` heads for a KV head."""
    return max(1, layout.QUERY_ROWS // group)


def attention_items(batch: StepBatch, group: int) -> tuple[Ints, Ints, int]:
    """Return the items of a step's attention, its merges, and its number of partial results.

    A row of items [I, ITEM_WORDS] is: sequence, first query, number of queries, part, partial
    result. A decode with a long context has an item for each part, and the partial results are
    merged. Other items have -1 there, and attend to their whole context. A row of merges [_, 3] is:
    token, first partial result, number of them.
    """
    starts, lengths = batch.cu_seqlens_q, batch.seq_lens
    if 0 < len(batch.token_ids) == len(lengths) and lengths.max() <= layout.PART:
        items = np.empty((len(lengths), layout.ITEM_WORDS), np.int64)
        items[:, 0], items[:, 1:] = np.arange(len(lengths)), _DECODE
        return items, np.empty((0, 3), np.int64), 0
    counts = np.diff(starts)
    num_queries = queries_of_item(group)
    parts = np.where(counts == 1, (lengths - 1) // layout.PART + 1, 1)
    numbers = np.where(parts > 1, parts, -(-counts // num_queries))
    sequence = np.repeat(np.arange(len(counts)), numbers)
    index = np.arange(len(sequence)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    is_part = parts[sequence] > 1
    items = np.full((len(sequence), layout.ITEM_WORDS), -1, np.int64)
    items[:, 0] = sequence
    items[:, 1] = np.where(is_part, 0, index * num_queries)
    items[:, 2] = np.minimum(num_queries, counts[sequence] - items[:, 1])
    items[:, 3] = index
    items[is_part, 4] = np.arange(np.count_nonzero(is_part))
    long = np.flatnonzero(parts > 1)
    ends = np.cumsum(parts[long])
    merges = np.stack([starts[long], ends - parts[long], parts[long]], axis=1)
    return items, merges, int(ends[-1]) if len(long) else 0


_DECODE = np.array([0, 1, 0, -1, -1, -1, -1])
"""The words of an item after its sequence, for one query that sees its whole context."""
