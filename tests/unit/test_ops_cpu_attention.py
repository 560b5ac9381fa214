"""Compare attention over blocks with `ops.attention.paged_attention`, and with itself bit for bit.

Every cache here is NaN except in the slots of the sequences' own tokens. Every block table
continues past its sequence with numbers that are no block.
"""

from itertools import pairwise

import numpy as np
import pytest
from step_batches import partial_batch

from mie.ops.attention import paged_attention
from mie.ops.backend import KVCacheShape
from mie.ops_cpu import attention as attention_module
from mie.ops_cpu.attention import Attention
from mie.ops_cpu.kv_cache import new_cache
from mie.ops_cpu.workers import Workers

# A sum of some hundred weighted values of order 1; scores are of a few units.
ATOL = {"float32": 5e-6, "float64": 1e-13}
DTYPES = tuple(ATOL)
LENGTHS = (1, 127, 128, 129, 300, 256, 700, 40)


@pytest.fixture(params=["usual items", "small items"])
def items(request, monkeypatch):
    """Cut a step's attention as for real models, or into many items that threads share."""
    if request.param == "small items":
        monkeypatch.setattr(attention_module, "WORTH_SHARING", 1)
        monkeypatch.setattr(attention_module, "CACHED", 1 << 12)
        monkeypatch.setattr(attention_module, "SCORES", 1 << 15)


class Keys:
    """The tokens of some sequences in a cache, in one run of blocks each or in scattered blocks."""

    def __init__(self, lengths, *, heads, scattered, block_size=16, head_dim=8, dtype="float64"):
        rng = np.random.default_rng(7)
        self.lengths, self.heads, self.block_size = np.array(lengths), heads, block_size
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 3
        shape = KVCacheShape(
            num_layers=2,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=heads[1],
            head_dim=head_dim,
        )
        self.cache = new_cache(shape, np.dtype(dtype))
        self.cache.fill(np.nan)
        ids = list(range(num_blocks))
        if scattered:
            np.random.default_rng(8).shuffle(ids)
        self.tables = np.full((len(lengths), max(needed) + 2), 10**9)
        total = sum(lengths)
        keys = rng.normal(size=(2, total, heads[1], head_dim))
        self.q = rng.normal(size=(total, heads[0], head_dim)).astype(dtype)
        at = 0
        for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            self.tables[row, :count] = [ids.pop(0) for _ in range(count)]
            position = np.arange(length)
            blocks = self.tables[row, position // block_size]
            self.cache[1][:, blocks, position % block_size] = keys[:, at : at + length]
            at += length
        self.starts = np.concatenate([[0], np.cumsum(lengths)])

    def batch(self, counts):
        """Return the queries and the batch of a step that computes each sequence's last tokens."""
        rows = np.concatenate(
            [np.arange(end - n, end) for n, end in zip(counts, self.starts[1:], strict=True)]
        )
        starts = np.concatenate([[0], np.cumsum(counts)])
        lay = {"cu_seqlens_q": starts, "seq_lens": self.lengths, "block_tables": self.tables}
        return self.q[rows], partial_batch(**lay)

    def expected(self, q, batch, window):
        planes = self.cache[1].astype(np.float64)
        scale = q.shape[-1] ** -0.5
        lay = batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, scale, window
        return paged_attention(q.astype(np.float64), *planes, *lay)  # type: ignore[call-arg]


def attend(keys, counts, window=None, *, num_threads=2, invariant=True):
    q, batch = keys.batch(counts)
    attention = Attention(Workers(num_threads), is_batch_invariant=invariant)
    return attention(q, keys.cache, 1, batch, window)


@pytest.mark.few
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1)])
@pytest.mark.parametrize("window", [None, 100])
def test_a_result_depends_only_on_what_the_query_sees(items, dtype, heads, window):
    """It is the same bit for bit alone and in a batch, in a decode, a prompt and a chunk.

    It is also the same for adjacent and scattered blocks, and for one thread and three.
    """
    everyone = [attend(Keys(LENGTHS, heads=heads, scattered=False, dtype=dtype), LENGTHS, window)]
    scattered = Keys(LENGTHS, heads=heads, scattered=True, dtype=dtype)
    everyone += [attend(scattered, LENGTHS, window, num_threads=n) for n in (1, 3)]
    for other in everyone[1:]:
        np.testing.assert_array_equal(other, everyone[0])
    last = [stop - 1 for stop in np.cumsum(LENGTHS)]
    for decoded in (attend(scattered, [1] * 8, window, num_threads=n) for n in (1, 2, 3)):
        np.testing.assert_array_equal(decoded, everyone[0][last])
    for count in (2, 3, 40):
        chunk = attend(scattered, [min(count, n) for n in LENGTHS], window)
        rows = np.concatenate(
            [
                np.arange(stop - min(count, stop - start), stop)
                for start, stop in pairwise([0, *np.cumsum(LENGTHS)])
            ]
        )
        np.testing.assert_array_equal(chunk, everyone[0][rows])
    for i in (3, 6):
        alone = Keys(LENGTHS, heads=heads, scattered=True, dtype=dtype)
        alone.lengths, alone.tables = alone.lengths[i : i + 1], alone.tables[i : i + 1]
        alone.starts = alone.starts[i : i + 2]
        np.testing.assert_array_equal(attend(alone, [1], window), everyone[0][last[i]][None])


def test_a_plan_is_not_reused_in_another_step():
    keys = Keys(LENGTHS, heads=(4, 2), scattered=True)
    attention = Attention(Workers(1), is_batch_invariant=True)
    for counts in ([1] * 8, [1, 5, 1, 2, 3, 1, 7, 4], [1] * 8):
        q, batch = keys.batch(counts)
        for window in (None, 50, None):
            got = attention(q, keys.cache, 1, batch, window)
            np.testing.assert_allclose(got, keys.expected(q, batch, window), rtol=0, atol=1e-13)
