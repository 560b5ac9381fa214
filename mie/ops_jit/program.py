"""Record the operators of a forward pass as a program, and bind it to memory.

A program is an array of instructions: the address of a kernel, how many tiles of work it has, and
its arguments. The number of tiles follows from the step, so one program serves every batch. A call
of a function of the host has the place of an instruction.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_jit.layout import ARGUMENTS, INSTRUCTION_WORDS, NUM_PAIRS, NUM_ROWS, NUM_TOKENS
from mie.ops_jit.memory import zeros

ROOM = 64
"""The number of rows of buffers is a multiple of this."""


@dataclass(eq=False)
class Storage:
    """Where a result is: rows of ``width`` float32 numbers."""

    rows: int
    """The header's word with the number of rows: `NUM_TOKENS`, `NUM_ROWS` or `NUM_PAIRS`."""
    width: int
    array: Floats | None = None
    """The numbers, if they exist before the program runs."""
    last_use: int = -1
    """The last instruction that uses it."""
    buffer: int = -1
    """The buffer that it shares with others."""


@dataclass(frozen=True, eq=False)
class Value:
    """A result in a program that is being recorded. It stands for an array."""

    program: Program
    storage: Storage
    tail: tuple[int, ...]
    """The shape of a row."""

    def __len__(self) -> int:
        return self.program.lengths[self.storage.rows]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the step that is being recorded."""
        return (len(self), *self.tail)

    def reshape(self, *shape: int) -> Value:
        """Return the same rows, each with another shape."""
        tail = (self.storage.width,) if shape[1:] == (-1,) else shape[1:]
        assert (shape[0], math.prod(tail)) == (len(self), self.storage.width)
        return Value(self.program, self.storage, tail)


Argument = Value | NDArray[Any] | int | float | None

HostFunction = Callable[[Floats, Floats, Floats | None], object]
"""A function of the host that fills its first argument from the others."""


def room_for(num_rows: int) -> int:
    """Return the number of rows of buffers that hold ``num_rows``."""
    return ceil_div(num_rows, ROOM) * ROOM


class Program:
    """Instructions, and the buffers of their results.

    Results share a buffer if their uses do not overlap.
    """

    def __init__(self, address_of: Callable[[str], int], num_tokens: int, num_rows: int) -> None:
        """Begin to record a step of this size. ``address_of`` returns the address of a kernel."""
        self.lengths = {NUM_TOKENS: num_tokens, NUM_ROWS: num_rows, NUM_PAIRS: 0}
        """The numbers of rows of the step that is recorded or run, by the header's word."""
        self.num_chosen = 0
        """Experts of a token."""
        self.heads = (1, 1, 16)
        """Hq, Hkv and Dh of its attention. They decide how `StepHeader` cuts it into items."""
        self.scratch_bytes = 0
        """The most memory that one of its kernels needs for a thread."""
        self.rounded: dict[tuple[Storage, str], Value] = {}
        """Results rounded to 8 bits, by the result and the kernel that rounds it."""
        self.calls: dict[int, tuple[HostFunction, Value, Value, Value | None]] = {}
        """The calls of functions of the host, by the number of their instruction."""
        self._address_of = address_of
        self._rows: list[list[int]] = []
        self._uses: list[tuple[int, int, Storage]] = []  # instruction, word, storage
        self._storages: list[Storage] = []
        self._kept: list[NDArray[Any]] = []  # arrays with addresses that are arguments
        self._buffers: list[tuple[int, int]] = []  # the word of the number of rows, the width
        self._memory: list[Floats] = []
        self._capacity = dict.fromkeys(self.lengths, -1)  # no memory, not even for no rows
        self.words: NDArray[np.int64] = np.empty(0, np.int64)
        """The instructions [I, INSTRUCTION_WORDS], once `finish` was called."""

    def __len__(self) -> int:
        return len(self._rows)

    def value(self, rows: int, *tail: int) -> Value:
        """Return a new result with as many rows as this word of the header says."""
        self._storages.append(storage := Storage(rows, math.prod(tail)))
        return Value(self, storage, tail)

    def given(self, array: Floats) -> Value:
        """Return an existing array with a row for each token, as a value."""
        array = np.ascontiguousarray(array, np.float32)
        storage = Storage(NUM_TOKENS, math.prod(array.shape[1:]), array)
        return Value(self, storage, array.shape[1:])

    def maybe_given(self, x: Value | Floats | None) -> Value | None:
        """Return a value as it is, and an array as `given`."""
        return self.given(x) if isinstance(x, np.ndarray) else x

    def emit(self, kernel: str, count: int, size: int, factor: int, *arguments: Argument) -> None:
        """Append an instruction with ceil(header[count] / size) * factor tiles."""
        row = [self._address_of(kernel), count, size, factor]  # as `layout` numbers them
        row += [self._word(argument, word) for word, argument in enumerate(arguments, ARGUMENTS)]
        self._rows.append(row + [0] * (INSTRUCTION_WORDS - len(row)))

    def call(
        self, function: HostFunction, x: Value, width: int, added: Value | None = None
    ) -> Value:
        """Call a function of the host between two instructions. Return its result [T, width]."""
        out = self.value(x.storage.rows, width)
        given = out, x, added
        words = [self._word(each, word) for word, each in enumerate(given, ARGUMENTS)]
        self.calls[len(self._rows)] = function, *given
        self._rows.append([0] * ARGUMENTS + words + [0] * (INSTRUCTION_WORDS - ARGUMENTS - 3))
        return out

    def run_call(self, number: int) -> None:
        """Call the function that has this number among the instructions."""
        function, out, x, added = self.calls[number]
        function(self.array(out), self.array(x), None if added is None else self.array(added))

    def choose(self, num_chosen: int) -> None:
        """Set the number of experts of a token."""
        self.num_chosen = num_chosen
        self.set_step(self.lengths[NUM_TOKENS], self.lengths[NUM_ROWS])

    def set_step(self, num_tokens: int, num_rows: int) -> None:
        """Set the lengths for another step."""
        num_pairs = num_tokens * self.num_chosen
        self.lengths = {NUM_TOKENS: num_tokens, NUM_ROWS: num_rows, NUM_PAIRS: num_pairs}

    def need_scratch(self, num_bytes: int) -> None:
        """Note that a kernel needs this much memory for a thread."""
        self.scratch_bytes = max(self.scratch_bytes, num_bytes)

    def _word(self, argument: Argument, word: int) -> int:
        """Return an argument as 64 bits."""
        if argument is None:
            return 0
        if isinstance(argument, Value):
            storage = argument.storage
            storage.last_use = len(self._rows)
            if storage.array is None:
                self._uses.append((len(self._rows), word, storage))
                return 0
            argument = storage.array
        if isinstance(argument, np.ndarray):
            assert argument.flags.c_contiguous
            self._kept.append(argument)
            return argument.ctypes.data
        if isinstance(argument, float):
            return int.from_bytes(struct.pack("<f", argument), "little")
        return argument

    def finish(self, result: Value | None = None) -> None:
        """End the recording. ``result`` is read after the program, and no other is."""
        self.words = np.array(self._rows, np.int64).reshape(-1, INSTRUCTION_WORDS)
        if result is not None:
            result.storage.last_use = len(self._rows)
        first: dict[int, int] = {}
        for instruction, _, storage in self._uses:
            first.setdefault(id(storage), instruction)
        free_from: list[int] = []  # by buffer: the first instruction that may use it again
        for storage in sorted(self._storages, key=lambda each: first[id(each)]):
            begin, key = first[id(storage)], (storage.rows, storage.width)
            for buffer, own in enumerate(self._buffers):
                if own == key and free_from[buffer] <= begin:
                    break
            else:
                buffer = len(self._buffers)
                self._buffers.append(key)
                free_from.append(0)
            storage.buffer, free_from[buffer] = buffer, storage.last_use + 1

    def bind(self) -> None:
        """Provide memory for a step of the program's lengths.

        Raises:
            MemoryError: there is not enough. The next call tries again.
        """
        capacity = self._capacity
        if all(needed <= capacity[rows] for rows, needed in self.lengths.items()):
            return
        # An interrupt or a fork can come at any line, so there is no room until all is in place.
        self._capacity = dict.fromkeys(capacity, 0)
        self._memory = []  # freed before the larger ones are allocated
        larger = {
            rows: max(capacity[rows], room_for(number)) for rows, number in self.lengths.items()
        }
        self._memory = [zeros((larger[rows], width), np.float32) for rows, width in self._buffers]
        for instruction, word, storage in self._uses:
            self.words[instruction, word] = self._memory[storage.buffer].ctypes.data
        self._capacity = larger

    @property
    def nbytes(self) -> int:
        """The size of the buffers."""
        return sum(each.nbytes for each in self._memory)

    def array(self, value: Value) -> Floats:
        """Return a result of the last run. It lasts until the next run."""
        if value.storage.array is not None:
            return value.storage.array.reshape(value.shape)
        rows: Floats = self._memory[value.storage.buffer][: len(value)]
        return rows.reshape(value.shape)
