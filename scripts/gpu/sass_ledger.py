"""Compare the machine code of the kernels with a ledger, tests/kernels/sass.json.

The ledger has a line for each kernel and target:

    [resident warps, local accesses, outside of loops, [loop, …]]

A loop is a list of the fields of `gpu.sass.Part`. Each is compared per unit of work: a product on
tensor cores, or a byte of global memory, or else one iteration. So a compiler that unrolls a loop
twice changes nothing. Code outside of loops runs once, and is compared as it is.

Bytes are those that the instructions name. The emulator counts whether they are useful.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gpu.nvrtc_kernels import ROOT
from gpu.sass import Part
from mie.lab.sim.devices import DEVICES

LEDGER = ROOT / "tests" / "kernels" / "sass.json"


GPUS = {gpu.arch: gpu for device in DEVICES.values() if (gpu := device.gpu)}
"""A GPU of each architecture. The limits on the blocks of a multiprocessor are the same on all."""


class Profile(NamedTuple):
    """The contents of a kernel's machine code, and its occupancy."""

    warps: int
    """Warps that a multiprocessor holds at once."""
    local: int
    outside: Part
    loops: tuple[Part, ...]


Profiles = dict[str, Profile]
"""The profile of each kernel, by names such as "rms_norm.cu rms_norm<float>"."""


def resident_warps(arch: int, *, threads: int, registers: int, shared_bytes: int) -> int:
    """Return how many warps of a kernel a multiprocessor holds at once.

    Registers are given to a warp by 256, out of a quarter of the 65,536. CUDA reserves 1 KB of
    shared memory for each block and rounds the rest up to 128 bytes.
    """
    gpu, warps = GPUS[arch], -(-threads // 32)
    of_a_warp = -(-registers * 32 // 256) * 256
    by_registers = 16384 // of_a_warp * 4 // warps
    by_shared = gpu.shared_bytes // (1024 + -(-shared_bytes // 128) * 128)
    return warps * min(gpu.blocks, gpu.warps // warps, by_registers, by_shared)


def growth(profiles: Mapping[str, Profile], ledger: Mapping[str, Profile]) -> Iterator[str]:
    """Yield sentences about machine code that does more than in the ledger."""
    for kernel in sorted(ledger.keys() - profiles.keys()):
        yield f"{kernel} is in the ledger of machine code, and no more (--update)"
    for kernel, now in profiles.items():
        if kernel not in ledger:
            yield f"{kernel} is not in the ledger of machine code (--update)"
            continue
        for sentence in _kernel_growth(now, ledger[kernel]):
            yield f"{kernel}: {sentence} (--update if it is worth it)"


def _kernel_growth(now: Profile, before: Profile) -> Iterator[str]:
    if now.warps < before.warps:
        yield f"resident warps fell from {before.warps} to {now.warps}"
    if now.local > before.local:
        yield f"accesses of local memory grew from {before.local} to {now.local}"
    for name, count, old in zip(Part._fields, now.outside, before.outside, strict=True):
        if count > old:
            yield f"outside of loops, {name} grew from {old} to {count}"
    if len(now.loops) != len(before.loops):
        yield (
            f"the hot loops were {_sizes(before)}, and are {_sizes(now)} (instructions an "
            "iteration)"
        )
        return
    for i, (loop, old_loop) in enumerate(zip(now.loops, before.loops, strict=True)):
        unit, work = work_of(loop)
        old_unit, old_work = work_of(old_loop)
        if unit != old_unit:
            yield f"loop {i} worked by {old_unit}, and works by {unit}"
            continue
        for name, count, old in zip(Part._fields, loop, old_loop, strict=True):
            if count * old_work > old * work:
                per = f"{name} per {unit}"
                yield f"loop {i}: {per} grew from {old / old_work:.4g} to {count / work:.4g}"


def work_of(part: Part) -> tuple[str, int]:
    """Return the unit of work of a loop, and how much of it an iteration does."""
    if part.mma:
        return "MMA", part.mma
    if part.bytes:
        return "byte", part.bytes
    return "iteration", 1


def table(profiles: Mapping[str, Profile], text: str) -> Iterator[str]:
    """Yield lines about the kernels that have ``text`` in their names."""
    for kernel, profile in profiles.items():
        if text not in kernel:
            continue
        yield f"  {kernel}: {profile.warps} resident warps, {profile.local} local accesses"
        parts = {"outside": profile.outside} | {
            f"loop {i}": loop for i, loop in enumerate(profile.loops)
        }
        for name, part in parts.items():
            unit, work = work_of(part)
            counts = ", ".join(
                f"{count} {field}"
                for field, count in zip(Part._fields, part, strict=True)
                if count or field == "instructions"
            )
            share = f", MMA share {part.mma / part.instructions:.1%}" if part.mma else ""
            yield f"    {name}: {counts}; {part.instructions / work:.4g} per {unit}{share}"


def _sizes(profile: Profile) -> str:
    return ", ".join(str(loop.instructions) for loop in profile.loops) or "none"


def read(path: Path = LEDGER) -> dict[str, Profiles]:
    """Return the ledger by target, then by kernel."""
    ledger: dict[str, Profiles] = {}
    for kernel, targets in json.loads(path.read_text()).items() if path.exists() else ():
        for target, (warps, local, outside, loops) in targets.items():
            parts = tuple(Part(*loop) for loop in loops)
            ledger.setdefault(target, {})[kernel] = Profile(warps, local, Part(*outside), parts)
    return ledger


def write(ledger: Mapping[str, Profiles], path: Path = LEDGER) -> None:
    """Write a line for each kernel and target, so that a change is easy to read."""
    by_kernel: dict[str, list[str]] = {}
    for target, profiles in ledger.items():
        for kernel, profile in profiles.items():
            numbers = json.dumps(profile, separators=(",", ":"))
            by_kernel.setdefault(kernel, []).append(f"{json.dumps(target)}: {numbers}")
    kernels = [
        f"{json.dumps(kernel)}: {{\n" + ",\n".join(lines) + "\n}"
        for kernel, lines in sorted(by_kernel.items())
    ]
    path.write_text("{\n" + ",\n".join(kernels) + "\n}\n")
