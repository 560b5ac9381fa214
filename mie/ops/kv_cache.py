"""The paged KV cache of one layer: writing, gathering and copying its blocks.

A cache is one array [N, B, Hkv, Dh] for the keys and one for the values. The slot of a token is
``block_id * B + offset``: the cache seen as [N * B, Hkv, Dh] is indexed by it.
"""

import numpy as np

from mie.ops.arrays import Floats, Ints


def write_kv(
    keys: Floats,
    values: Floats,
    k_cache: Floats,
    v_cache: Floats,
    slot_mapping: Ints,
) -> None:
    """Store keys and values [T, Hkv, Dh] in the caches [N, B, Hkv, Dh] at slot_mapping [T].

    The caches must be contiguous over N and B, so that slots are a view of them.
    """
    slots_shape = (-1, *k_cache.shape[2:])
    k_cache.reshape(slots_shape)[slot_mapping] = keys
    v_cache.reshape(slots_shape)[slot_mapping] = values


def gather_kv(cache: Floats, block_ids: Ints, start: int, stop: int) -> Floats:
    """The tokens start … stop - 1 of a sequence, as an array [stop - start, Hkv, Dh] of its own.

    cache [N, B, Hkv, Dh]; block_ids [M] is the sequence's block table, read only where needed.
    """
    block_size = cache.shape[1]
    first = start // block_size
    blocks = np.take(cache, block_ids[first : -(-stop // block_size)], axis=0)
    offset = first * block_size
    return blocks.reshape(-1, *cache.shape[2:])[start - offset : stop - offset]


def copy_blocks(caches: Floats, src: Ints, dst: Ints) -> None:
    """Copy whole blocks src [C] onto dst [C] in every plane of ``caches`` [..., N, B, Hkv, Dh].

    All sources are read before any destination is written.
    """
    move_blocks(caches, caches, src, dst)


def move_blocks(source: Floats, target: Floats, src: Ints, dst: Ints) -> None:
    """Copy whole blocks src [C] of ``source`` onto dst [C] of ``target``, both [..., N, B, Hkv, Dh]
    with their own N, in every plane."""
    target[..., dst, :, :, :] = source[..., src, :, :, :]
