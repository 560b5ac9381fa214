"""Check kernel arguments, because CuPy checks neither their number nor their types.

A parameter's type is written in letters: ``f4`` float, ``i4`` int, ``u1`` unsigned char, and so on.
``f2`` and ``b2`` are the 16-bit floats, and ``s`` is a struct. ``*c`` or ``*m`` before it is a
pointer to constant or to mutable memory. The emulator gets the types from the compiler. For the GPU
they are read from the source text, which the emulator compares.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

MAX_THREADS = 1024

_LETTERS = {
    "bool": "u1",
    "signed char": "i1",
    "unsigned char": "u1",
    "short": "i2",
    "unsigned short": "u2",
    "int": "i4",
    "unsigned": "u4",
    "unsigned int": "u4",
    "long long": "i8",
    "unsigned long long": "u8",
    "float": "f4",
    "double": "f8",
    "f16": "f2",
    "bf16": "b2",
    "int8": "i1",
    "e4m3": "u1",
}

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
        """The letters without a struct's size, which the source text does not tell."""
        return re.sub(r"s\d+$", "s", self.letters)

    @cached_property
    def dtypes(self) -> list[np.dtype[Any]]:
        """The dtypes of a number or of what a pointer points at, empty if any will do."""
        # Any dtype will do for a pointer to a struct such as uint4.
        return _DTYPES.get(self.letters[2:] if self.is_pointer else self.letters, [])

    @cached_property
    def number_types(self) -> list[type[Any]]:
        """The types of a number, empty for pointers and structs."""
        return [] if self.is_pointer else [dtype.type for dtype in self.dtypes]


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


# Reading signatures from the source text.

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?"


def kernels_in(source: str) -> dict[str, bool]:
    """Return the kernels in source order: name, and whether it is a template."""
    found = re.finditer(
        rf"(template\s*<[^{{}}();]*>\s*)?__global__\s+{_BOUNDS}void\s+{_BOUNDS}(\w+)\s*\(",
        _COMMENT.sub(" ", source),
    )
    return {match[2]: bool(match[1]) for match in found}


def plain_kernels(source: str) -> list[str]:
    """Return the kernels that are not templates, in source order."""
    return [name for name, is_template in kernels_in(source).items() if not is_template]


def read_signature(source: str, name: str) -> tuple[Parameter, ...]:
    """Return the parameters of the kernel ``name``, such as ``rms_norm<float, 64>``."""
    text = _COMMENT.sub(" ", source)
    plain, _, rest = name.partition("<")
    found = re.search(
        r"(?:template\s*<([^{}();]*)>\s*)?__global__\s+"
        rf"{_BOUNDS}void\s+{_BOUNDS}{re.escape(plain.strip())}\s*\(([^)]*)\)",
        text,
    )
    if found is None:
        raise ValueError(f"no __global__ void {plain}(...) in the source of {name}")
    bound = _bind(found[1] or "", rest.rpartition(">")[0])
    return tuple(_parameter(words, bound) for words in _split(found[2]))


def _bind(template: str, arguments: str) -> dict[str, str]:
    """Map type template parameters to their arguments."""
    values = _split(arguments)
    bound: dict[str, str] = {}
    for index, words in enumerate(_split(template)):
        declared, _, default = words.partition("=")
        kind, _, name = declared.strip().rpartition(" ")
        if kind in ("typename", "class"):
            value = values[index] if index < len(values) else default.strip()
            bound[name] = bound.get(value, value)
    return bound


def _split(text: str) -> list[str]:
    """Split at the commas outside angle brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "<") - (character == ">")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _parameter(words: str, bound: dict[str, str]) -> Parameter:
    declared = words.replace("__restrict__", " ").replace("__grid_constant__", " ")
    match = re.fullmatch(r"\s*(.*?)\s*(\w+)\s*", declared, re.DOTALL)
    if match is None:
        raise ValueError(f"cannot read the parameter {words!r}")
    pointee, star, _ = match[1].partition("*")
    kind = [word for word in pointee.split() if word != "const"]
    is_constant = len(kind) < len(pointee.split())
    plain = " ".join(bound.get(word, word) for word in kind)
    letters = _LETTERS.get(plain, "s")
    if star:
        letters = ("*c" if is_constant else "*m") + letters
    return Parameter(name=match[2], letters=letters)
