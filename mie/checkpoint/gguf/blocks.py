"""Decode the blocks of GGUF's types to small numbers with a scale for each group.

A decoder gets blocks [n, bytes] and returns codes [n, numbers], scales [n, groups] and offsets
[n, groups] or None, as `mie.ops.weights.quantised` defines them. Types with units return each of
the last two as units [n, 1] and integers [n, groups]. Products of a float16 and such an integer are
exact in float32.

Source: ggml/src/ggml-quants.c of llama.cpp.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.checkpoint.gguf.header import BLOCKS
from mie.checkpoint.layouts import FP4
from mie.ops.weights.quantised import Form, QuantisedRows, ScaleBits

Bytes = NDArray[Any]  # uint8
Scales = NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]
Parts = tuple[NDArray[Any], Scales, Scales | None]

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]
_BITS = np.arange(8, dtype=np.uint8)[:, None]


def decode(kind: str, raw: Bytes) -> QuantisedRows:
    """Return rows from their bytes [rows, bytes] in a type of `FORMS`."""
    form, decoder = FORMS[kind], _DECODERS[kind]
    blocks = raw.reshape(-1, BLOCKS[kind][1])
    codes, scales, offsets = decoder(blocks)
    planes = {"codes": codes}
    for name, values in (("scale", scales), ("offset", offsets)):
        if isinstance(values, tuple):
            planes[f"{name}_units"], values = values
        if values is not None:
            planes[f"{name}s"] = values
    rows = {name: plane.reshape(len(raw), -1) for name, plane in planes.items()}
    return QuantisedRows.of_kept(form, rows)


def _whole(parts: Bytes) -> Bytes:
    """Return parts of blocks [..., m] as an array of their own.

    NumPy copies an element of m bytes ten times as fast as m elements.
    """
    copied: Bytes = np.ascontiguousarray(parts.view(f"V{parts.shape[-1]}")).view(np.uint8)
    return copied


def _half(blocks: Bytes, place: int) -> NDArray[np.float32]:
    """Return the float16 at byte ``place`` of each block, as [n, 1]."""
    return _whole(blocks[:, place : place + 2]).view("<f2").astype(np.float32)


def _halves(packed: Bytes) -> Bytes:
    """Split the last axis [m] of bytes into [2, m]: their low halves, then their high halves."""
    packed, element = _whole(packed), f"V{packed.shape[-1]}"
    halves = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    elements = halves.view(element)
    elements[..., 0, :] = (packed & 15).view(element)
    elements[..., 1, :] = (packed >> 4).view(element)
    return halves


def _signed(codes: Bytes, zero: int) -> NDArray[np.int8]:
    """Return the codes [n, numbers] minus their zero point, in the same memory."""
    signed: NDArray[np.int8] = codes.reshape(len(codes), -1).view(np.int8)
    if zero:
        signed -= np.int8(zero)
    return signed


def _q8_0(blocks: Bytes) -> Parts:
    return _whole(blocks[:, 2:]).view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: Bytes) -> Parts:
    return _signed(_halves(blocks[:, 2:]), 8), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return _signed(_halves(blocks[:, 4:]), 0), _half(blocks, 0), _half(blocks, 2)


def _five_bits(blocks: Bytes, place: int) -> Bytes:
    """Return codes [n, 32] with their fifth bits at byte ``place``, before the other four."""
    fifth = np.unpackbits(blocks[:, place : place + 4], axis=1, bitorder="little")
    codes: Bytes = _halves(blocks[:, place + 4 :]).reshape(-1, 32) | fifth << 4
    return codes


def _q5_0(blocks: Bytes) -> Parts:
    return _signed(_five_bits(blocks, 2), 16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    return _signed(_five_bits(blocks, 4), 0), _half(blocks, 0), _half(blocks, 2)


def _two_bits(packed: Bytes) -> Bytes:
    """Return [n, 2, 4, 32] numbers of two bits from 64 bytes."""
    return packed.reshape(-1, 2, 1, 32) >> _PAIRS & 3


def _q2_k(blocks: Bytes) -> Parts:
    scales = _half(blocks, 80), blocks[:, :16] & 15
    offsets = -_half(blocks, 82), blocks[:, :16] >> 4
    return _signed(_two_bits(blocks[:, 16:80]), 0), scales, offsets


def _q3_k(blocks: Bytes) -> Parts:
    third = blocks[:, None, :32] >> _BITS & 1
    low = _halves(blocks[:, 96:104]).reshape(-1, 16)
    high = (blocks[:, None, 104:108] >> _PAIRS & 3).reshape(-1, 16)
    codes = _two_bits(blocks[:, 32:96]).reshape(-1, 8, 32) | third << 2
    return _signed(codes, 4), (_half(blocks, 108), _signed(low | high << 4, 32)), None


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Return 8 scales and 8 minima of six bits each from 12 bytes."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        np.hstack((first & 63, rest & 15 | first >> 6 << 4)),
        np.hstack((second & 63, rest >> 4 | second >> 6 << 4)),
    )


def _q4_k(blocks: Bytes) -> Parts:
    scales, minima = _six_bits(blocks[:, 4:16])
    codes = _halves(blocks[:, 16:].reshape(-1, 4, 32))
    return _signed(codes, 0), (_half(blocks, 0), scales), (-_half(blocks, 2), minima)


def _q5_k(blocks: Bytes) -> Parts:
    scales, minima = _six_bits(blocks[:, 4:16])
    fifth = blocks[:, None, 16:48] >> _BITS & 1
    codes = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth << 4
    return _signed(codes, 0), (_half(blocks, 0), scales), (-_half(blocks, 2), minima)


def _q6_k(blocks: Bytes) -> Parts:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = _two_bits(blocks[:, 128:192]).reshape(-1, 256)
    scales = _half(blocks, 208), blocks[:, 192:208].view(np.int8)
    return _signed(low | high << 4, 32), scales, None


def _iq4_nl(blocks: Bytes) -> Parts:
    return _IQ4[_halves(blocks[:, 2:])], _half(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> Parts:
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=-1).reshape(-1, 8)
    high = (blocks[:, 2:4, None] >> _PAIRS[:, 0] & 3).reshape(-1, 8)
    codes = _IQ4[_halves(blocks[:, 8:].reshape(-1, 8, 16))]
    return codes, (_half(blocks, 0), _signed(low | high << 4, 32)), None


def _mxfp4(blocks: Bytes) -> Parts:
    # The table has twice the values, so the scale is half of 2**(e - 127).
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    scales[blocks[:, :1] > 252] = np.inf  # 12 times such a scale overflows
    return FP4[_halves(blocks[:, 1:])], scales, None


def _form(codes: Any, group: int, scale_bits: ScaleBits, **promises: bool) -> Form:
    return Form(
        codes=codes, group=group, scale_bits=scale_bits, **{"has_offsets": False} | promises
    )


FORMS: Mapping[str, Form] = {
    "Q8_0": _form("int8", 32, 16),
    "Q4_0": _form("int4", 32, 16),
    "Q4_1": _form("int4", 32, 16, has_offsets=True),
    "Q5_0": _form("int8", 32, 16, has_six_bits=True),
    "Q5_1": _form("int8", 32, 16, has_offsets=True, has_six_bits=True),
    "Q2_K": _form("int4", 16, 8, has_offsets=True),
    "Q3_K": _form("int4", 16, 8),
    "Q4_K": _form("int4", 32, 8, has_offsets=True),
    "Q5_K": _form("int8", 32, 8, has_offsets=True, has_six_bits=True),
    "Q6_K": _form("int8", 16, 8, has_six_bits=True),
    "IQ4_NL": _form("int8", 32, 16),
    "IQ4_XS": _form("int8", 32, 8),
    "MXFP4": _form("int8", 32, 32),
}
"""The form of each quantised type."""

_DECODERS: Mapping[str, Callable[[Bytes], Parts]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
