"""Load the object files of kernels. LLVM can do this too, but its library takes 50 MiB.

Kernels are compiled for the large code model: addresses in their code have 64 bits, so sections may
be anywhere. Kernels call nothing by name.

Sources: the System V ABI (object files; relocations of x86-64), and ELF for the Arm 64-bit
Architecture.
"""

import ctypes
import mmap
import os
import struct
from typing import NamedTuple

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops_jit.memory import address

_HEADER = struct.Struct("<18xH20xQ12xH2x")  # machine, place and number of sections
_SYMBOL = struct.Struct("<I2xHQ8x")  # name, section, value
_RELOCATION = struct.Struct("<QIIq")  # place, type, symbol, addend
_BYTES, _SYMBOLS, _RELOCATIONS = 1, 2, 4
"""Types of sections."""
_IS_LOADED = 2
"""The flag of a section that is in memory."""
_X86_64, _AARCH64 = 62, 183
_ADDRESS = ((_X86_64, 1), (_AARCH64, 257))
"""Relocations that write an address."""
_DISTANCE = (_AARCH64, 260)
"""A relocation that writes the distance from its place to an address."""
_QUARTERS = {(_AARCH64, 264): 0, (_AARCH64, 266): 16, (_AARCH64, 268): 32, (_AARCH64, 269): 48}
"""Relocations that write 16 bits of an address into an instruction, from this bit on."""


class CannotLink(Exception):
    """An object file cannot be loaded."""


class _Section(NamedTuple):
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


_SECTION = struct.Struct("<4xIQ8xQQIIQ8x")


class Library:
    """Loaded kernels. Their code stays in memory as long as this object."""

    def __init__(self) -> None:
        self._loaded: list[mmap.mmap] = []

    def load(self, code: bytes) -> int:
        """Load an object file of `mie.ops_jit.compiler`, and return the address of its kernel.

        Raises:
            CannotLink: it has a relocation that kernels do not need, or the system refuses memory
                for code.
        """
        machine, start, count = _HEADER.unpack_from(code)
        table = code[start : start + count * _SECTION.size]
        sections = [_Section(*values) for values in _SECTION.iter_unpack(table)]
        parts = [code[each.offset : each.offset + each.size] for each in sections]
        places, size = {}, 0
        for number, section in enumerate(sections):
            if section.kind == _BYTES and section.flags & _IS_LOADED:
                places[number] = ceil_div(size, section.alignment) * section.alignment
                size = places[number] + section.size
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = address(np.frombuffer(memory, np.uint8))
        for number, place in places.items():
            memory[place : place + len(parts[number])] = parts[number]
        [table_of_symbols] = (n for n, each in enumerate(sections) if each.kind == _SYMBOLS)
        symbols = [*_SYMBOL.iter_unpack(parts[table_of_symbols])]
        for section, part in zip(sections, parts, strict=True):
            if section.kind == _RELOCATIONS and section.info in places:
                for place, kind, number, addend in _RELOCATION.iter_unpack(part):
                    _, target, value = symbols[number]
                    if target not in places:
                        raise CannotLink(f"symbol {number} is in another library")
                    place += places[section.info]
                    value += base + places[target] + addend
                    _relocate(memory, (machine, kind), place, value, base)
        _make_executable(base, size, machine)
        self._loaded.append(memory)
        names = parts[sections[table_of_symbols].link]
        [kernel] = (each for each in symbols if names[each[0] :].startswith(b"kernel\0"))
        return int(base + places[kernel[1]] + kernel[2])


def _relocate(
    memory: mmap.mmap, relocation: tuple[int, int], place: int, value: int, base: int
) -> None:
    """Write an address at a place of the memory. The memory begins at the address ``base``."""
    if relocation in _ADDRESS:
        struct.pack_into("<Q", memory, place, value)
    elif relocation == _DISTANCE:
        struct.pack_into("<q", memory, place, value - base - place)
    elif relocation in _QUARTERS:
        [instruction] = struct.unpack_from("<I", memory, place)
        bits = value >> _QUARTERS[relocation] & 0xFFFF
        struct.pack_into("<I", memory, place, instruction | bits << 5)
    else:
        raise CannotLink("relocation {1} of machine {0} is not read".format(*relocation))


def _make_executable(base: int, size: int, machine: int) -> None:
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if protect(base, size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise CannotLink(f"memory for code: {os.strerror(ctypes.get_errno())}")
    if machine == _AARCH64:  # caches of instructions do not see what was written
        clear = ctypes.CDLL("libgcc_s.so.1")["__clear_cache"]
        clear.argtypes = ctypes.c_void_p, ctypes.c_void_p
        clear(base, base + size)
