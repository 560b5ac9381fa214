"""Handle arrays on the device and on the host, and name their element types."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.errors import ConfigError
from mie.ops.backend import Array

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

_KERNEL_TYPES = {
    DTYPES["float32"]: "float",
    DTYPES["float16"]: "f16",
    DTYPES["bfloat16"]: "bf16",
    np.dtype(np.int8): "int8",
    np.dtype(np.uint8): "e4m3",  # an 8-bit float, for which CuPy has no dtype
    np.dtype(np.uint32): "int4x8",
}


def kernel_type(array: Array) -> str:
    """Return the kernels' name of the array's element type."""
    return element_type(array.dtype)


def element_type(dtype: np.dtype[Any]) -> str:
    """Return the kernels' name of the dtype."""
    return _KERNEL_TYPES[dtype]


def rounded(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a copy in ``dtype``, or raise ConfigError if a number does not fit it."""
    try:
        with np.errstate(over="raise"):
            wide = array.astype(np.float64 if array.dtype == np.float64 else np.float32)
            return wide.astype(dtype)
    except FloatingPointError:
        largest = np.abs(array.astype(np.float64)).max()
        raise ConfigError(
            f"a weight of {largest:g} does not fit {dtype.name} (choose dtype bfloat16 or float32)"
        ) from None


def to_host(array: Array) -> NDArray[Any]:
    """Return the array as a NumPy array, copied if it is on the device."""
    host: NDArray[Any] = array.get() if hasattr(array, "get") else array
    return host


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def block_threads(wanted: int, most: int = 256) -> int:
    """Return a thread count for a block: whole warps, close to ``wanted``, at most ``most``."""
    return min(most, 32 * max(1, ceil_div(wanted, 32)))
