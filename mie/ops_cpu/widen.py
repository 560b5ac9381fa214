"""16-bit weights that stay so, and are widened where they are used."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.errors import ConfigError
from mie.ops.arrays import Floats


def stored(block: NDArray[Any], weight_dtype: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A block of a checkpoint as it is kept: in ``dtype`` under "auto", else as it is.

    Raises:
        ConfigError: the checkpoint has another dtype than ``weight_dtype``.
    """
    if weight_dtype == "auto":
        return block.astype(dtype, copy=False)
    if block.dtype.name != weight_dtype:
        raise ConfigError(
            f"weight_dtype is {weight_dtype!r}; the checkpoint has weights in {block.dtype.name}, "
            "and they are kept as they are or widened (use 'auto')"
        )
    if block.dtype == np.float16 and not np.isfinite(block).all():
        raise ConfigError(
            "weight_dtype is 'float16'; the checkpoint has weights that are infinite or no numbers "
            "(use 'auto')"
        )
    return block


def widen(weights: NDArray[Any], out: Floats) -> Floats:
    """``weights`` in the dtype of ``out``, exactly."""
    if weights.dtype == np.float16 and out.dtype == np.float32:
        _widen_half(weights, out)
    else:
        np.copyto(out, weights)
    return out


def _widen_half(weights: NDArray[Any], out: Floats) -> None:
    """NumPy converts one float16 at a time; integer operations do it four times as fast.

    Sign, exponent (5 bits) and fraction (10) move to where float32 has them (8 and 23 bits), and
    the exponents' biases differ by 112. Infinities would come out finite.
    """
    bits = out.view(np.int32)
    np.copyto(bits, weights.view(np.int16))  # the sign is extended to the left
    np.left_shift(bits, np.int32(13), out=bits)
    np.bitwise_and(bits, np.int32(-0x70002000), out=bits)  # 0x8fffe000
    np.multiply(out, np.float32(2.0**112), out=out)
