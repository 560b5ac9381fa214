"""Embed tokens and multiply matrices."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.errors import ConfigError
from mie.ops.arrays import Floats, Ints


def embed(token_ids: Ints, table: Floats) -> Floats:
    """Return the rows of ``table`` [V, D] named by ``token_ids`` [T], as a new array [T, D]."""
    rows: Floats = table[token_ids]
    return rows


def linear(
    x: Floats, weight: Floats, bias: Floats | None = None, residual: Floats | None = None
) -> Floats:
    """Return ``x @ weight + bias + residual`` as a new array [T, N].

    x [T, K], weight [K, N] (the transpose of the [N, K] that Hugging Face stores), bias [N],
    residual [T, N]; all of one float dtype.
    """
    y: Floats = x @ weight
    if bias is not None:
        y += bias
    if residual is not None:
        y += residual
    return y


def in_groups(x: Floats, size: int) -> Floats:
    """Return the rows of x [T, K] as groups [G, size, K], the last one filled with zeros."""
    padded = np.zeros((ceil_div(len(x), size) * size, x.shape[1]), x.dtype)
    padded[: len(x)] = x
    return padded.reshape(-1, size, x.shape[1])


def check_kept(block: NDArray[Any], weight_dtype: str) -> NDArray[Any]:
    """Return the block of a checkpoint that a backend keeps unchanged.

    Raises:
        ConfigError: the block has another dtype than ``weight_dtype``.
    """
    if block.dtype.name != weight_dtype:
        raise ConfigError(
            f"weight_dtype is {weight_dtype!r}; the checkpoint has weights in {block.dtype.name}, "
            "and they are kept as they are or widened (use 'auto')"
        )
    return block
