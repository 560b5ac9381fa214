"""Define a paged KV cache of 4-bit codes, and the numbers that it represents.

A vector of keys or values is cut into groups of 32 channels. Each group is rotated (`rotated`), so
that a channel with large numbers is spread over its group. The rotated numbers get codes from 0 to
15, a scale and an offset, as in KIVI's values (Liu et al., 2024, arXiv:2402.02750). Rotations by
Hadamard's matrix are QuaRot's (Ashkboos et al., 2024, arXiv:2404.00456).

A vector is rounded alone. So its bits depend on no other token, batch, chunk or block.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops.kv_cache import GROUP, slots_of

LARGEST_CODE = 15
ROTATION_IN, ROTATION_OUT = 1 / 8, 1 / 4
"""Factors of the rotations before rounding and after it. Two plain ones multiply by 32."""


@dataclass(frozen=True, eq=False)
class Int4Cache:
    """Codes, and the scales and offsets of groups.

    The planes before N are indexed like an array's: ``cache[layer, 0]``.
    """

    codes: NDArray[np.uint8]  # [..., N, B, Hkv, Dh / 2]: of two channels, the first is the low one
    factors: NDArray[np.float16]  # [..., N, B, Hkv, 2, G]: the scales, then the offsets

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> "Int4Cache":
        """Return a cache of zeros of ``shape`` [..., N, B, Hkv, Dh]. Dh is even."""
        *outer, size = shape
        factors = (*outer, 2, ceil_div(size, GROUP))
        return cls(np.zeros((*outer, size // 2), np.uint8), np.zeros(factors, np.float16))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers that it represents."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    def write(self, vectors: Floats, slot_mapping: Ints) -> None:
        """Store vectors [T, Hkv, Dh] in the slots of a plane."""
        rounded = quantize(vectors)
        slots_of(self.codes)[slot_mapping] = rounded.codes
        slots_of(self.factors)[slot_mapping] = rounded.factors

    def take(self, block_ids: Ints, dtype: DTypeLike) -> Floats:
        """Return the numbers of blocks [..., B, Hkv, Dh] of a plane, computed in ``dtype``."""
        codes = np.take(self.codes, block_ids, axis=0)
        factors = np.take(self.factors, block_ids, axis=0)
        return dequantize(Int4Cache(codes, factors), dtype)

    def move(self, target: "Int4Cache", src: Ints, dst: Ints) -> None:
        """Copy whole blocks to a cache of the same kind, in every plane."""
        target.codes[..., dst, :, :, :] = self.codes[..., src, :, :, :]
        target.factors[..., dst, :, :, :, :] = self.factors[..., src, :, :, :, :]

    def planes_of(self, block_id: int) -> list[NDArray[Any]]:
        """Return views of the codes and of the factors of a block."""
        return [self.codes[..., block_id, :, :, :], self.factors[..., block_id, :, :, :, :]]

    def __getitem__(self, planes: Any) -> "Int4Cache":
        return Int4Cache(self.codes[planes], self.factors[planes])


def rotated(x: Floats, factor: float) -> Floats:
    """Multiply each whole group of x [..., Dh] by ``factor`` and Hadamard's matrix of order 32.

    The matrix is Sylvester's. Sums are taken in five passes, of channels at distance 1, 2, 4, 8 and
    16. A last group of less than 32 channels is not rotated.
    """
    size = x.shape[-1] // GROUP * GROUP
    whole = x[..., :size] * x.dtype.type(factor)
    for distance in (1, 2, 4, 8, 16):
        pairs = whole.reshape(*x.shape[:-1], -1, 2, distance)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        whole = np.stack([first + second, first - second], axis=-2)
    return np.concatenate([whole.reshape(*x.shape[:-1], size), x[..., size:]], axis=-1)


def quantize(x: Floats) -> Int4Cache:
    """Quantise the vectors of x [..., Dh].

    Groups are rotated and divided by 8. scale = (max - min) / 15 and offset = min, both rounded to
    float16. code = (number - offset) / scale, rounded to nearest, ties to even, at least 0 and at
    most 15. It is 0 where the scale is 0. A group with a NaN, or with a scale or an offset that
    float16 does not have, gets NaN for both and codes of 0, so all of it reads as NaN.
    """
    size = x.shape[-1]
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = rotated(x, ROTATION_IN)
        groups = [numbers[..., start : start + GROUP] for start in range(0, size, GROUP)]
        lowest, highest = (
            np.stack([find(group, axis=-1) for group in groups], axis=-1)
            for find in (np.min, np.max)
        )
        scales = (highest - lowest + 0) / x.dtype.type(LARGEST_CODE)  # -0 becomes 0
        factors = np.stack([scales, lowest + 0], axis=-2).astype(np.float16)
    is_finite = np.isfinite(factors).all(axis=-2, keepdims=True)
    factors = np.where(is_finite, factors, np.float16(np.nan))
    scales, offsets = _of_channels(factors, size, x.dtype)
    divisors = np.where(scales > 0, scales, np.inf).astype(x.dtype)
    quotients = np.where(scales > 0, numbers - offsets, 0) / divisors
    codes = np.clip(np.rint(quotients), 0, LARGEST_CODE).astype(np.uint8)
    return Int4Cache(codes[..., ::2] | codes[..., 1::2] << np.uint8(4), factors)


def dequantize(cache: Int4Cache, dtype: DTypeLike) -> Floats:
    """Return the numbers that a cache represents, computed in ``dtype``.

    code * scale + offset is rounded once. Then groups are rotated and divided by 4.
    """
    codes = np.stack([cache.codes & 15, cache.codes >> 4], axis=-1)
    numbers: Floats = codes.reshape(cache.shape).astype(dtype)
    scales, offsets = _of_channels(cache.factors, numbers.shape[-1], numbers.dtype)
    return rotated(numbers * scales + offsets, ROTATION_OUT)


def _of_channels(
    factors: NDArray[np.float16], size: int, dtype: np.dtype[Any]
) -> tuple[Floats, Floats]:
    """Return the scales and the offsets of each of ``size`` channels."""
    numbers = np.repeat(factors.astype(dtype), GROUP, axis=-1)[..., :size]
    return numbers[..., 0, :], numbers[..., 1, :]
