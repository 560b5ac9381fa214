"""Run a program with several threads that share every instruction's tiles.

One word, the ticket, holds the run, the instruction, and the number of its tiles that are left. A
thread takes tiles by lowering the ticket with compare-and-swap. The thread that finishes the last
tile of an instruction sets the ticket to the next one. So there is no barrier where all threads
must arrive: a thread that the system has not scheduled holds up nobody unless it has taken tiles. A
thread that comes late, with a ticket of an earlier run, cannot take a tile, because the
compare-and-swap fails.

Between runs a worker spins for a while and then sleeps on its semaphore. The team's memory has the
addresses of POSIX's sem_wait and sem_post.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mie.ops_jit.kernels.vectors import (
    I32,
    I64,
    Emitted,
    call,
    call_kernel_at,
    int64,
    kernel_function,
    plain,
    pointer,
    set_word,
    word,
)
from mie.ops_jit.layout import (
    ARGUMENTS,
    DONE,
    END,
    HEADER,
    INSTRUCTION_SHIFT,
    INSTRUCTION_WORDS,
    KERNEL,
    POST,
    PROGRAM,
    RUN_SHIFT,
    SEMAPHORE,
    SHARE_SHIFT,
    SLEEPERS,
    STOP,
    TICKET,
    TILE_COUNT,
    TILE_FACTOR,
    TILE_SIZE,
    TILES,
    WAIT,
    WORKER_WORDS,
    YIELD,
)

LAST_RUN = (1 << 23) - 1
"""The number of a run after which they begin again at 0."""
SPINS = 20_000
"""Turns that a worker spins for the next run before it sleeps: 0.2 to 1 ms, by the CPU's pause.

The host needs about 0.2 ms between two steps, and waking a worker would take a tenth of that.
"""
MOST_TILES = 16
"""Most tiles that a thread takes at once. Neighbouring tiles read memory in one stream."""
TURNS_BEFORE_YIELD = 1024
"""Turns after which a waiting thread offers its CPU to others."""


@intrinsic
def acquire(_: Any, address: Any) -> Emitted:
    """Load a word, before everything that follows."""
    return plain(int64, [int64], lambda b, at: b.load_atomic(pointer(b, at, I64), "acquire", 8))


@intrinsic
def release(_: Any, address: Any, value: Any) -> Emitted:
    """Store a word, after everything that precedes."""

    def emit(b: ir.IRBuilder, at: ir.Value, value: ir.Value) -> None:
        b.store_atomic(value, pointer(b, at, I64), "seq_cst", 8)

    return plain(types.void, [int64, int64], emit)


@intrinsic
def swap_if(_: Any, address: Any, old: Any, new: Any) -> Emitted:
    """Replace a word if it is ``old``. Return whether it was."""

    def emit(b: ir.IRBuilder, at: ir.Value, old: ir.Value, new: ir.Value) -> ir.Value:
        pair = b.cmpxchg(pointer(b, at, I64), old, new, "seq_cst", "seq_cst")
        return b.zext(b.extract_value(pair, 1), I64)

    return plain(int64, [int64, int64, int64], emit)


def _changing(instruction: str) -> Any:
    """Return a function that changes the word at an address and returns the old one."""

    @intrinsic
    def change(_: Any, address: Any, value: Any) -> Emitted:
        def emit(b: ir.IRBuilder, at: ir.Value, value: ir.Value) -> ir.Value:
            return b.atomic_rmw(instruction, pointer(b, at, I64), value, "seq_cst")

        return plain(int64, [int64, int64], emit)

    return change


exchange, fetch_add = _changing("xchg"), _changing("add")


@intrinsic
def pause(_: Any) -> Emitted:
    """Mark a spin-wait for the CPU."""

    def emit(b: ir.IRBuilder) -> None:
        is_arm = b.module.triple.startswith("aarch64")
        name, values = ("llvm.aarch64.hint", [I32(1)]) if is_arm else ("llvm.x86.sse2.pause", [])
        call(b, name, ir.VoidType(), values)

    return plain(types.void, [], emit)


@intrinsic
def call_c(_: Any, function: Any, argument: Any) -> Emitted:
    """Call a C function at an address with a pointer, and return its int."""

    def emit(b: ir.IRBuilder, function: ir.Value, argument: ir.Value) -> ir.Value:
        signature = ir.FunctionType(I32, [I64])
        result = b.call(b.inttoptr(function, signature.as_pointer()), [argument])
        return b.sext(result, I64)

    return plain(int64, [int64, int64], emit)


@intrinsic
def call_kernel(_: Any, kernel, args, step, tile, scratch) -> Emitted:
    """Call the kernel of an operator at an address."""
    return plain(types.void, [int64] * 5, call_kernel_at)


@kernel_function
def next_ticket(team, run, instruction):
    """Return the ticket of the first instruction from this one on that has tiles, or of the end.

    Store its number of tiles. The ticket counts it down.
    """
    tiles = 0
    program, header, end = word(team, PROGRAM), word(team, HEADER), word(team, END)
    while instruction < end:
        row = program + instruction * INSTRUCTION_WORDS * 8
        size = word(row, TILE_SIZE)
        tiles = (word(header, word(row, TILE_COUNT)) + size - 1) // size * word(row, TILE_FACTOR)
        if tiles > 0:
            set_word(team, TILES, tiles)
            break
        instruction += 1
    return (run << RUN_SHIFT) | (instruction << INSTRUCTION_SHIFT) | tiles


@kernel_function
def take_part(team, run, scratch):
    """Do tiles of this run until it ends. Return at once if it is over."""
    ticket_at, done_at = team + TICKET * 8, team + DONE * 8
    turns = 0
    while True:
        ticket = acquire(ticket_at)
        instruction = (ticket >> INSTRUCTION_SHIFT) & ((1 << (RUN_SHIFT - INSTRUCTION_SHIFT)) - 1)
        if ticket >> RUN_SHIFT != run or instruction >= word(team, END):
            return
        left = ticket & ((1 << INSTRUCTION_SHIFT) - 1)
        if left > 0:
            count = max(1, min(MOST_TILES, left >> word(team, SHARE_SHIFT)))
            if swap_if(ticket_at, ticket, ticket - count) == 0:
                continue
            # The instruction cannot end before these tiles are counted, so its words do not change
            # until then.
            row = word(team, PROGRAM) + instruction * INSTRUCTION_WORDS * 8
            args, tiles = row + ARGUMENTS * 8, word(team, TILES)
            for tile in range(tiles - left, tiles - left + count):
                call_kernel(word(row, KERNEL), args, word(team, HEADER), tile, scratch)
            if fetch_add(done_at, count) + count == tiles:
                set_word(team, DONE, 0)
                release(ticket_at, next_ticket(team, run, instruction + 1))
            turns = 0
        else:
            pause()
            turns += 1
            if turns % TURNS_BEFORE_YIELD == 0:
                call_c(word(team, YIELD), 0)


@kernel_function
def run(team, program, header, first, end, workers, scratch):
    """Run the instructions first … end - 1 with the caller and ``workers`` other threads."""
    run = ((acquire(team + TICKET * 8) >> RUN_SHIFT) + 1) & LAST_RUN
    set_word(team, PROGRAM, program)
    set_word(team, HEADER, header)
    set_word(team, END, end)
    release(team + TICKET * 8, next_ticket(team, run, first))
    for worker in range(workers):
        at = team + (SLEEPERS + worker * WORKER_WORDS) * 8
        if exchange(at, 0) == 1:
            call_c(word(team, POST), at + SEMAPHORE * 8)
    take_part(team, run, scratch)


@kernel_function
def work(team, worker, scratch):
    """Take part in every run until the team stops."""
    ticket_at, at = team + TICKET * 8, team + (SLEEPERS + worker * WORKER_WORDS) * 8
    run = 0
    while acquire(team + STOP * 8) == 0:
        turns = 0
        while acquire(ticket_at) >> RUN_SHIFT == run and acquire(team + STOP * 8) == 0:
            pause()
            turns += 1
            if turns == SPINS:
                exchange(at, 1)
                # The first to clear the flag decides: this worker, or the caller of a new run.
                if acquire(ticket_at) >> RUN_SHIFT == run or exchange(at, 0) == 0:
                    while call_c(word(team, WAIT), at + SEMAPHORE * 8) != 0:
                        pass
                turns = 0
            elif turns % TURNS_BEFORE_YIELD == 0:
                call_c(word(team, YIELD), 0)
        run = acquire(ticket_at) >> RUN_SHIFT
        take_part(team, run, scratch)
