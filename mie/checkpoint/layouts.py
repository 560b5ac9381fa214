"""Convert the tensors of each quantised format to rows of a form, exactly.

A matrix [N, K] has G = ceil(K / group) scales in a row. Integers of 4 bits are packed eight in an
int32, and integers of 8 bits four. "Along K" means that an int32 has neighbouring inputs.

    pack-quantized    weight_packed [N, K / 8] along K, weight_scale [N, G], weight_shape [2],
                      weight_zero_point [N / 8, G] along N. Integers are stored plus 8 (or 128).
    int-quantized     weight int8 [N, K], weight_scale [N, G], weight_zero_point int8 [N, G]
    float-quantized   weight float8_e4m3fn [N, K], weight_scale [N, G]
    gptq              qweight [K / 8, N] along K, qzeros [G, N / 8] along N, scales [G, N],
                      g_idx [K]. Zero points are stored minus 1, in version 2 as they are.
    awq               qweight [K, N / 8] and qzeros [G, N / 8] along N in a shuffled order,
                      scales [G, N]
    mxfp4             blocks uint8 [N, K / 32, 16], scales uint8 [N, K / 32]. A byte has two
                      neighbouring inputs, the even one low. Scales are exponents plus 127.

Sources: `compressed_tensors.compressors`, AutoGPTQ's ``qlinear_cuda_old.py``, GPTQModel's
``convert_gptq_v1_to_v2_format``, AutoAWQ's ``packing_utils.py``, and OCP's specification of MX.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mie.errors import ModelError, UnsupportedModelError, WeightsError
from mie.model.layers.config import Scheme
from mie.ops.weights.packed import unpack_nibbles
from mie.ops.weights.quantised import GROUPS, Form, QuantisedRows

Shape = tuple[int, ...]
Read = Callable[[str], NDArray[Any]]
"""Returns a tensor of the matrix by the end of its name."""

FLOATS = ("F32", "F16", "BF16")
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the floats of 4 bits, by their bits."""
AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The nibble of an int32 that holds each of eight neighbouring outputs."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """The types and the shapes that a tensor may have."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """The tensors of one matrix [N, K] in one of the formats."""

    shape: tuple[int, int]
    scheme: Scheme
    scale_dtype: str
    """The type of the scales, as safetensors spells it."""

    by_rows: ClassVar[bool] = True
    """Whether rows of the matrix are contiguous in the file."""

    @property
    def inputs(self) -> int:
        """Inputs that share a scale in the file."""
        return self.scheme.group or self.shape[1]

    @property
    def num_groups(self) -> int:
        """Scales of a row in the file."""
        return -(-self.shape[1] // self.inputs)

    @property
    def form(self) -> Form:
        """The form that holds these weights exactly.

        16-bit scales times integers are exact in float32, so zero points become offsets. Products
        of float32 scales are not, and 4-bit integers minus zero points become 8-bit integers.

        Raises:
            UnsupportedModelError: there is no such form.
        """
        scheme = self.scheme
        group = max((size for size in GROUPS if self.inputs % size == 0), default=GROUPS[-1])
        if scheme.group is None:
            group = GROUPS[-1]
        is_float = scheme.format == "float-quantized"
        if scheme.symmetric or self.scale_dtype != "F32":
            small, has_offsets = "int4" if scheme.bits == 4 else "int8", not scheme.symmetric
        elif scheme.bits == 4:
            small, has_offsets = "int8", False
        else:
            raise UnsupportedModelError(
                "8-bit integers with zero points and float32 scales are not supported (save the "
                "scales in 16 bits)"
            )
        codes: Any = "float8_e4m3fn" if is_float else small
        return Form(codes=codes, group=group, has_offsets=has_offsets)

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that the file must hold, by the ends of their names."""

    def optional(self) -> frozenset[str]:
        """Return the ends of names of tensors that a file may hold, and that are not used."""
        return frozenset()

    def problem(self, read: Read) -> ModelError | None:
        """Return the error if the small tensors of the matrix have values of no use."""
        return None

    @abstractmethod
    def rows(self, read: Read, first: int, last: int) -> QuantisedRows:
        """Return the rows first … last - 1. Both are multiples of 8, or ``last`` is N."""

    def _quantised(
        self, codes: NDArray[Any], scales: NDArray[Any], zeros: NDArray[np.int8] | None
    ) -> QuantisedRows:
        """Return codes [n, K] minus zeros, times scales, both [n, G], as rows of the form.

        Zeros count from the same origin as codes.
        """
        form, num_columns = self.form, self.shape[1]
        of_file = np.arange(0, num_columns, form.group) // self.inputs
        wide = np.ascontiguousarray(scales[:, of_file]).astype(np.float32)
        offsets = None
        if zeros is not None and form.has_offsets:
            offsets = -zeros[:, of_file].astype(np.float32) * wide
        elif zeros is not None:
            codes = codes - np.repeat(zeros, self.inputs, axis=1)[:, :num_columns]
        return QuantisedRows(form=form, codes=codes, scales=wide, offsets=offsets)

    def _scale(self) -> Tensor:
        """Return the scales of compressed-tensors."""
        num_rows, groups = self.shape[0], self.num_groups
        shapes: tuple[Shape, ...] = ((num_rows, groups),)
        if self.scheme.group is None:
            shapes = (*shapes, (num_rows,), (1,), (1, 1), ())
        return Tensor(dtypes=FLOATS, shapes=shapes)

    def _scales(self, read: Read, first: int, last: int) -> NDArray[Any]:
        """Return the scales [n, G] of compressed-tensors. One scale may hold for all rows."""
        scales = read("weight_scale").reshape(-1, self.num_groups)
        if len(scales) == 1:
            return scales.repeat(last - first, axis=0)
        return scales[first:last]


class PackQuantised(Layout):
    """Integers of 4 or 8 bits, packed."""

    def tensors(self) -> Mapping[str, Tensor]:
        (num_rows, num_columns), per_word = self.shape, 32 // self.scheme.bits
        tensors = {
            "weight_packed": Tensor(
                dtypes=("I32",), shapes=((num_rows, -(-num_columns // per_word)),)
            ),
            "weight_scale": self._scale(),
            "weight_shape": Tensor(dtypes=("I64", "I32"), shapes=((2,),)),
        }
        if not self.scheme.symmetric:
            shape = (-(-num_rows // per_word), self.num_groups)
            tensors["weight_zero_point"] = Tensor(dtypes=("I32",), shapes=(shape,))
        return tensors

    def optional(self) -> frozenset[str]:
        return frozenset({"input_scale", "input_zero_point"})

    def problem(self, read: Read) -> ModelError | None:
        stated = tuple(read("weight_shape").tolist())
        if stated == self.shape:
            return None
        return WeightsError(f"weight_shape is {stated}; config.json asks for {self.shape}")

    def rows(self, read: Read, first: int, last: int) -> QuantisedRows:
        bits, zeros = self.scheme.bits, None
        codes = unpack(read("weight_packed")[first:last], bits)[:, : self.shape[1]]
        if not self.scheme.symmetric:
            words = slice(first * bits // 32, -(-last * bits // 32))
            zeros = unpack(read("weight_zero_point")[words].T, bits)[:, : last - first].T
            zeros = centred(zeros, bits, self.scheme.symmetric)
        codes = centred(codes, bits, self.scheme.symmetric)
        return self._quantised(codes, self._scales(read, first, last), zeros)


class Plain(Layout):
    """Numbers of 8 bits, one in a byte: int-quantized and float-quantized."""

    def tensors(self) -> Mapping[str, Tensor]:
        dtype = "F8_E4M3" if self.scheme.format == "float-quantized" else "I8"
        tensors = {
            "weight": Tensor(dtypes=(dtype,), shapes=(self.shape,)),
            "weight_scale": self._scale(),
        }
        if not self.scheme.symmetric:
            tensors["weight_zero_point"] = Tensor(dtypes=("I8",), shapes=self._scale().shapes)
        return tensors

    def optional(self) -> frozenset[str]:
        return frozenset({"input_scale", "input_zero_point"})

    def rows(self, read: Read, first: int, last: int) -> QuantisedRows:
        codes, zeros = read("weight")[first:last], None
        if not self.scheme.symmetric:
            zeros = read("weight_zero_point").reshape(-1, self.num_groups)
            zeros = zeros.repeat(last - first, axis=0) if len(zeros) == 1 else zeros[first:last]
        return self._quantised(codes, self._scales(read, first, last), zeros)


class Gptq(Layout):
    """Integers of 4 or 8 bits with one zero point for all: 8 or 128."""

    by_rows = False

    def tensors(self) -> Mapping[str, Tensor]:
        (num_rows, num_columns), per_word = self.shape, 32 // self.scheme.bits
        groups, words = self.num_groups, -(-num_rows // per_word)
        return {
            "qweight": Tensor(dtypes=("I32",), shapes=((-(-num_columns // per_word), num_rows),)),
            "qzeros": Tensor(dtypes=("I32",), shapes=((groups, words),)),
            "scales": Tensor(dtypes=FLOATS, shapes=((groups, num_rows),)),
            "g_idx": Tensor(dtypes=("I32",), shapes=((num_columns,),)),
        }

    def problem(self, read: Read) -> ModelError | None:
        """Return an error for other zero points, or groups that are not neighbouring inputs."""
        num_rows, num_columns = self.shape
        if (read("g_idx") != np.arange(num_columns) // self.inputs).any():
            return UnsupportedModelError(
                "its inputs are in another order (desc_act true), which is not supported (use a "
                "model with desc_act false)"
            )
        bits = self.scheme.bits
        wanted = (1 << (bits - 1)) - (1 if self.scheme.format == "gptq" else 0)
        zeros = unpack(read("qzeros"), bits)[:, :num_rows]
        if (zeros.view(np.uint8) != wanted).any():
            return UnsupportedModelError(
                f"qzeros has other zero points than {wanted}, the one of symmetric "
                f"{self.scheme.format} files, which is not supported"
            )
        return None

    def rows(self, read: Read, first: int, last: int) -> QuantisedRows:
        bits = self.scheme.bits
        codes = unpack(read("qweight")[:, first:last].T, bits)[:, : self.shape[1]]
        return self._quantised(centred(codes, bits, True), read("scales")[:, first:last].T, None)


class Awq(Layout):
    """Integers of 4 bits with zero points, packed along outputs in an order of their own."""

    by_rows = False

    def tensors(self) -> Mapping[str, Tensor]:
        num_rows, num_columns = self.shape
        groups, words = self.num_groups, -(-num_rows // 8)
        return {
            "qweight": Tensor(dtypes=("I32",), shapes=((num_columns, words),)),
            "qzeros": Tensor(dtypes=("I32",), shapes=((groups, words),)),
            "scales": Tensor(dtypes=FLOATS, shapes=((groups, num_rows),)),
        }

    def rows(self, read: Read, first: int, last: int) -> QuantisedRows:
        codes, zeros = (
            self._ordered(read(name)[:, first // 8 : -(-last // 8)])[: last - first]
            for name in ("qweight", "qzeros")
        )
        return self._quantised(codes, read("scales")[:, first:last].T, zeros)

    @staticmethod
    def _ordered(words: NDArray[np.int32]) -> NDArray[np.int8]:
        """Return the integers of words [k, n / 8] as [n, k]."""
        nibbles = unpack(words, 4).reshape(*words.shape, 8)[..., AWQ_ORDER]
        return np.ascontiguousarray(nibbles.reshape(len(words), -1).T)


class Mxfp4(Layout):
    """Floats of 4 bits (E2M1) with a power of two for each 32. Their doubles are integers."""

    @property
    def form(self) -> Form:
        """The form of integers up to 12."""
        return Form(codes="int8", group=32, has_offsets=False)

    def tensors(self) -> Mapping[str, Tensor]:
        num_rows, groups = self.shape[0], self.num_groups
        return {
            "blocks": Tensor(dtypes=("U8",), shapes=((num_rows, groups, 16),)),
            "scales": Tensor(dtypes=("U8",), shapes=((num_rows, groups),)),
        }

    def rows(self, read: Read, first: int, last: int) -> QuantisedRows:
        packed = read("blocks")[first:last].reshape(last - first, -1)
        nibbles = unpack_nibbles(packed, 2 * packed.shape[1])[:, : self.shape[1]]
        exponents = read("scales")[first:last]
        scales = np.ldexp(np.float32(0.5), exponents.astype(np.int32) - 127)
        scales[exponents > 252] = np.inf  # 12 times such a scale overflows
        return QuantisedRows(form=self.form, codes=FP4[nibbles], scales=scales)


def layout_of(shape: tuple[int, int], scheme: Scheme, scale_dtype: str) -> Layout:
    """Return the layout of a matrix with this scheme."""
    kinds: Mapping[str, type[Layout]] = {
        "pack-quantized": PackQuantised,
        "int-quantized": Plain,
        "float-quantized": Plain,
        "gptq": Gptq,
        "gptq_v2": Gptq,
        "awq": Awq,
        "mxfp4": Mxfp4,
    }
    return kinds[scheme.format](shape=shape, scheme=scheme, scale_dtype=scale_dtype)


def unpack(words: NDArray[np.int32], bits: int) -> NDArray[np.int8]:
    """Return the integers in rows of int32, from the lowest bits up. Integers of 8 bits wrap."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    return octets.view(np.int8) if bits == 8 else unpack_nibbles(octets, 2 * octets.shape[1])


def centred(codes: NDArray[np.int8], bits: int, symmetric: bool) -> NDArray[np.int8]:
    """Return stored integers as codes: minus 128, or minus 8 if there are no zero points."""
    shift = np.int8(-128 if bits == 8 else 8 if symmetric else 0)
    shifted: NDArray[np.int8] = codes - shift  # codes of 8 bits wrap to signed ones
    return shifted
