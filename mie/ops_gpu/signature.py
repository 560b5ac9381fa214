"""Check kernel arguments, because CuPy checks neither their number nor their types.

A parameter's type is written in letters: ``f4`` float, ``i4`` int, ``u1`` unsigned char, and so on.
``f2`` and ``b2`` are the 16-bit floats, and ``s`` is a struct. ``*c`` or ``*m`` before it is a
pointer to constant or to mutable memory. kernels/signatures.json has the parameters of each kernel,
with ``T`` and ``C`` for the first and the last of its types. The emulator compares them with the
compiler's.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from mie.ops_gpu.source import KERNELS

MAX_THREADS = 1024

LETTERS = {"float": "f4", "f16": "f2", "bf16": "b2", "int8": "i1", "e4m3": "u1", "int4x8": "u4"}
"""The types that a template takes."""

SIGNATURES: dict[str, str] = json.loads((KERNELS / "signatures.json").read_text())

_DTYPES: dict[str, list[np.dtype[Any]]] = {
    "i1": [np.dtype(np.int8)],
    "u1": [np.dtype(np.uint8), np.dtype(np.bool_)],
    "i2": [np.dtype(np.int16)],
    "u2": [np.dtype(np.uint16)],
    "i4": [np.dtype(np.int32)],
    "u4": [np.dtype(np.uint32)],
    "i8": [np.dtype(np.int64)],
    "u8": [np.dtype(np.uint64)],
    "f4": [np.dtype(np.float32)],
    "f8": [np.dtype(np.float64)],
    "f2": [np.dtype(np.float16)],
    "b2": [np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16)],  # CuPy before 14 has no bfloat16
}


class KernelFault(AssertionError):
    """A kernel broke a rule that the emulator checks, or did not terminate."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a kernel: its name, and its type in letters."""

    name: str
    letters: str

    @cached_property
    def is_pointer(self) -> bool:
        """Whether it is a pointer."""
        return self.letters.startswith("*")

    @cached_property
    def is_struct(self) -> bool:
        """Whether it is a struct, passed by value."""
        return self.letters.startswith("s")

    @property
    def is_mutable(self) -> bool:
        """Whether it is a pointer to mutable memory."""
        return self.letters.startswith("*m")

    @property
    def unsized(self) -> str:
        """The letters without a struct's size. Only the compiler has that size."""
        return re.sub(r"s\d+$", "s", self.letters)

    @cached_property
    def dtypes(self) -> list[np.dtype[Any]]:
        """The dtypes of a number or of a pointer's target, empty if any will do."""
        # Any dtype will do for a pointer to a struct such as uint4.
        return _DTYPES.get(self.letters[2:] if self.is_pointer else self.letters, [])

    @cached_property
    def number_types(self) -> list[type[Any]]:
        """The types of a number, empty for pointers and structs."""
        return [] if self.is_pointer else [dtype.type for dtype in self.dtypes]


def declared(name: str) -> tuple[Parameter, ...] | None:
    """Return the parameters of a kernel such as ``rms_norm<float>``, or None if it is a test's."""
    template, *arguments = re.findall(r"\w+", name)
    if template not in SIGNATURES:
        return None
    types = [LETTERS[word] for word in arguments if word in LETTERS]
    found = []
    for parameter in SIGNATURES[template].split():
        own, _, letters = parameter.partition(":")
        if types:
            letters = letters.replace("T", types[0]).replace("C", types[-1])
        found.append(Parameter(name=own, letters=letters))
    return tuple(found)


def check_launch(kernel: str, grid: Sequence[int], block: Sequence[int]) -> None:
    """Raise ValueError unless ``grid`` and ``block`` are sizes of a possible launch."""
    for what, sizes in (("grid", grid), ("block", block)):
        if not 1 <= len(sizes) <= 3 or min(sizes) < 0:
            raise ValueError(f"{kernel}: {what} {tuple(sizes)} is not one to three sizes")
    if not 1 <= math.prod(block) <= MAX_THREADS:
        raise ValueError(f"{kernel}: a block of {tuple(block)} must have 1 … {MAX_THREADS} threads")


def check_arguments(
    kernel: str, parameters: Sequence[Parameter], args: Sequence[Any], array_type: Any
) -> None:
    """Raise TypeError unless ``args`` match the kernel's ``parameters``.

    A pointer takes a C-contiguous ``array_type`` of its dtype, or None. A number takes a NumPy
    scalar of exactly its type. A struct takes a structured NumPy array of one element.
    """
    if len(args) != len(parameters):
        names = ", ".join(parameter.name for parameter in parameters)
        raise TypeError(f"{kernel}: got {len(args)} arguments, takes {len(parameters)}: {names}")
    for parameter, arg in zip(parameters, args, strict=True):
        problem = _problem(parameter, arg, array_type)
        if problem:
            raise TypeError(f"{kernel}: argument {parameter.name} {problem}")


def _problem(parameter: Parameter, arg: Any, array_type: Any) -> str | None:
    """Return the problem with ``arg``, or None."""
    if parameter.is_pointer:
        if arg is None:
            return None
        if not isinstance(arg, array_type):
            return f"must be an array, got {type(arg).__name__}"
        if parameter.dtypes and arg.dtype not in parameter.dtypes:
            names = " or ".join(each.name for each in parameter.dtypes)
            return f"must point at {names}, got {arg.dtype.name}"
        return None if arg.flags.c_contiguous else "must be C-contiguous"
    if parameter.is_struct:
        if not isinstance(arg, np.ndarray) or arg.dtype.fields is None or arg.size != 1:
            return f"must be a structured array of one element, got {type(arg).__name__}"
        size = parameter.letters[1:]
        if size and arg.dtype.itemsize != int(size):
            return f"must be a struct of {size} bytes, got {arg.dtype.itemsize} (align=True?)"
        return None
    if type(arg) not in parameter.number_types:
        return f"must be a NumPy {parameter.dtypes[0].name}, got {type(arg).__name__}"
    return None
