"""Count the instructions in the loops of a kernel, in nvdisasm's listing of its machine code.

A loop is a natural loop of the control flow graph: a branch goes back to a block that every path to
the branch passes (Aho, Lam, Sethi and Ullman, Compilers, 9.6.6). Instructions of a nested loop
count in the nested loop only. Two kinds of code do not count at all: the subroutines for rare
cases of a division or a square root, and the paths of a warp that has diverged before a shuffle.
"""

import re
import subprocess
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Part(NamedTuple):
    """Instructions of a warp in one iteration of a loop, or outside of all loops."""

    instructions: int
    mma: int
    """Products on tensor cores."""
    requests: int
    """Loads, stores, copies and atomic operations in global memory."""
    bytes: int
    """Bytes of global memory that these name for each thread."""
    shared: int
    """Loads, stores and atomic operations in shared memory."""
    fp64: int
    """Arithmetic in double precision, conversions included."""
    cas: int
    """Compare-and-swap operations. They are repeated while other threads win."""

    @property
    def is_hot(self) -> bool:
        """Whether a loop of these instructions does more than count."""
        return any(self[1:])


class Listing(NamedTuple):
    """The machine code of one kernel."""

    opcodes: list[str]
    jumps: dict[int, tuple[int | None, bool]]
    """Where the instruction goes (None: the kernel ends), and whether it may also go on."""


class Counts(NamedTuple):
    """The contents of a kernel's machine code."""

    local: int
    """Loads and stores of local memory anywhere, so of spilled registers and indexed arrays."""
    outside: Part
    loops: tuple[Part, ...]
    """The hot loops, in the order of their first instructions."""

    @classmethod
    def from_json(cls, numbers: Sequence[Any]) -> "Counts":
        """Return the counts that JSON made a list of."""
        local, outside, loops = numbers
        return cls(local, Part(*outside), tuple(Part(*loop) for loop in loops))


_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)", re.MULTILINE)
_LINE = re.compile(
    r"^(\.L_x_\d+):|^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)([^;]*)", re.MULTILINE
)
_TARGET = re.compile(r"^\s*(.*?),?\s*`\((\.L_x_\d+)\)")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_GLOBAL = {"LDG", "STG", "LDGSTS", "RED", "REDG", "ATOMG", "LD", "ST", "ATOM"}
_SHARED = {"LDS", "STS", "LDSM", "STSM", "ATOMS"}
_DOUBLE = {"DADD", "DMUL", "DFMA", "DSETP", "DMNMX", "DMMA"}


def nvdisasm() -> Path | None:
    """Return the disassembler among the installed wheels, or None."""
    site = Path(sysconfig.get_paths()["platlib"])
    return next(iter(sorted(site.glob("nvidia/*/bin/nvdisasm"))), None)


def disassembled(program: Path, cubin: Path) -> dict[str, Counts]:
    """Return the counts of each kernel in a file of machine code, by its mangled name."""
    command = [str(program), "--print-code", "--no-dataflow", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: count(listing) for name, listing in read_listings(done.stdout)}


def read_listings(text: str) -> Iterator[tuple[str, Listing]]:
    """Yield the kernels of nvdisasm's output, with their mangled names."""
    pieces = _SECTION.split(text)
    for name, code in zip(pieces[1::2], pieces[2::2], strict=True):
        yield name, _read(code)


def _read(code: str) -> Listing:
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    branches: dict[int, tuple[str | None, bool]] = {}
    for label, predicate, opcode, operands in _LINE.findall(code):
        if label:
            labels[label] = len(opcodes)
            continue
        # A warp that has not diverged never takes BRA.DIV, and always takes BRA.CONV.
        if opcode.startswith("BRA") and not opcode.startswith("BRA.DIV"):
            found = _TARGET.match(operands)
            assert found, f"a branch to an unknown place: {opcode}{operands}"
            is_conditional = bool(predicate or found[1]) and not opcode.startswith("BRA.CONV")
            branches[len(opcodes)] = (found[2], is_conditional)
        elif opcode in ("EXIT", "RET.REL.NODEC", "KILL"):
            branches[len(opcodes)] = (None, bool(predicate))
        assert not opcode.startswith(("BRX", "JM")), f"an indirect jump: {opcode}"
        opcodes.append(opcode)
    jumps = {
        place: (None if label is None else labels[label], goes_on)
        for place, (label, goes_on) in branches.items()
    }
    return Listing(opcodes, jumps)


def count(listing: Listing) -> Counts:
    """Count the instructions of each loop, and of the code outside."""
    starts, following = _blocks(listing)
    ends = [*starts[1:], len(listing.opcodes)]
    members = _loops(following)
    reachable = _dominators(following).keys()
    innermost: dict[int, int] = {}
    for header in sorted(members, key=lambda each: len(members[each]), reverse=True):
        innermost |= dict.fromkeys(members[header], header)
    owned: dict[int | None, list[str]] = defaultdict(list)
    for block in sorted(reachable):
        owned[innermost.get(block)] += listing.opcodes[starts[block] : ends[block]]
    parts = [_part(owned[header]) for header in sorted(members)]
    return Counts(
        local=sum(opcode.startswith(("LDL", "STL")) for opcode in listing.opcodes),
        outside=_part(owned[None]),
        loops=tuple(part for part in parts if part.is_hot),
    )


def _blocks(listing: Listing) -> tuple[list[int], list[list[int]]]:
    """Return where the basic blocks begin, and which blocks follow each."""
    size = len(listing.opcodes)
    cuts = {0}
    for place, (target, _) in listing.jumps.items():
        cuts |= {place + 1} if target is None else {place + 1, target}
    starts = sorted(cut for cut in cuts if cut < size)
    number = {start: i for i, start in enumerate(starts)}
    following: list[list[int]] = []
    for end in [*starts[1:], size]:
        target, goes_on = listing.jumps.get(end - 1, (None, True))
        nexts = [] if target is None else [number[target]]
        following.append(nexts + ([number[end]] if goes_on and end < size else []))
    return starts, following


def _loops(following: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Return the blocks of every natural loop, by the loop's header."""
    dominators = _dominators(following)
    before: dict[int, list[int]] = defaultdict(list)
    for block in dominators:
        for after in following[block]:
            before[after].append(block)
    loops: dict[int, set[int]] = {}
    for block in dominators:
        for header in following[block]:
            if not dominators[block] >> header & 1:
                continue
            members, waiting = loops.setdefault(header, {header}), [block]
            while waiting:
                member = waiting.pop()
                if member not in members:
                    members.add(member)
                    waiting += before[member]
    return loops


def _dominators(following: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return the dominators of every reachable block, as bits of an integer."""
    order, seen, waiting = [], {0}, [(0, iter(following[0]))]
    while waiting:  # a walk in depth: a block comes after the blocks that it leads to
        block, nexts = waiting[-1]
        new = next((each for each in nexts if each not in seen), None)
        if new is None:
            order.append(block)
            waiting.pop()
        else:
            seen.add(new)
            waiting.append((new, iter(following[new])))
    order.reverse()
    before: dict[int, list[int]] = defaultdict(list)
    for block in order:
        for after in following[block]:
            before[after].append(block)
    every = (1 << len(following)) - 1
    dominators = dict.fromkeys(order, every) | {0: 1}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            common = every
            for each in before[block]:
                common &= dominators[each]
            common |= 1 << block
            changed |= common != dominators[block]
            dominators[block] = common
    return dominators


def _part(opcodes: Sequence[str]) -> Part:
    mma = requests = size = shared = fp64 = cas = 0
    for opcode in opcodes:
        base, *modifiers = opcode.split(".")
        mma += base.endswith("MMA")
        shared += base in _SHARED
        fp64 += base in _DOUBLE or "F64" in modifiers or "RCP64H" in modifiers
        cas += "CAS" in modifiers or "CAST" in modifiers
        if base in _GLOBAL:
            requests += 1
            size += next((_WIDTHS[each] for each in modifiers if each in _WIDTHS), 4)
    return Part(len(opcodes), mma, requests, size, shared, fp64, cas)
