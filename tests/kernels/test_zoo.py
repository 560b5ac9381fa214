"""Test the bug zoo: the checked build reports each planted bug at its line, and accepts the fix.

A checker that misses a kind of bug, or reports a false one, fails here before it misleads about a
kernel.
"""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from emulated import OneLibrary, needs_compiler, plain_kernels

from mie.ops_gpu.host.emulator import ORDERS, source_lines
from mie.ops_gpu.launcher import KernelFault

ZOO = Path(__file__).parent / "zoo.cu"
WARP = 32

pytestmark = needs_compiler

# The reports for each kernel. If a thread runs ahead of the write that it should wait for, it reads
# uninitialised memory. In another order this is a race.
EXPECTED = {
    "neighbour_without_barrier": "race: a read|uninitialised",
    "write_after_read": "race: a write .* and a read by|race: a read .* and a write by",
    "missing_syncwarp": "race: a read|uninitialised",
    "shuffle_is_no_barrier": "race: a read .* and a write by thread",
    "syncwarp_of_half_a_warp": "race: a read|uninitialised",
    "atomic_beside_plain_write": "race: an atomic operation|race: a write|uninitialised",
    "blocks_write_one_output": "race: a write of #2 .* by another block",
    "blocks_without_fence": "race: a read of #2 .* by another block",
    "divergent_barrier": "divergent barrier: .* exit",
    "two_barriers_for_one": "divergent barrier: .* threads wait at line",
    "exit_before_a_barrier": "divergent barrier: .* exit",
    "shuffle_in_a_branch": "divergence: .* exits|mask: .* have exited",
    "warp_waits_for_itself": "deadlock: 16 threads wait at .* 16 threads wait at",
    "shuffle_from_a_lane_outside_its_mask": "mask: a shuffle reads lane",
    "mask_without_the_caller": "mask: lane .* calls a vote",
    "write_past_the_end": "out of bounds: a write of 4 bytes, .* past the end of #2",
    "read_before_the_start": "out of bounds: a read of 4 bytes, .* before #1",
    "wild_pointer": "out of bounds: a write",
    "past_dynamic_shared_memory": "out of bounds: .* of dynamic shared memory, which has 256",
    "past_static_shared_memory": "out of bounds: an array index",
    "past_a_local_array": "out of bounds: an array index",
    "write_to_constant_input": "read-only: a write of #1",
    "uninitialised_shared": "uninitialised: a read of static shared",
    "uninitialised_scratch": "uninitialised: a read of #3",
    "misaligned_vector": "misaligned",
    "misaligned_ldmatrix": "misaligned: the row address .* to ldmatrix",
    "signed_overflow": "overflow: a signed product",
    "shift_too_far": "shift: out of range",
    "division_by_zero": "division: by zero",
    "copy_not_waited_for": "too early: a read",
    "copy_not_committed": "too early: a read",
    "copy_seen_without_barrier": "race: a read|too early|uninitialised",
    "copy_into_a_slot_being_read": "race|too early",
    "copy_never_waited_for": "not waited for",
    "copy_to_a_misaligned_place": "misaligned: the shared address",
    "copy_of_a_masked_row": "out of bounds: a read of 16 bytes, .* past the end of #1",
    "spin": "watchdog",
    "spin_on_an_atomic": "watchdog",
}

BLOCKS = {"blocks_write_one_output": 2, "write_past_the_end": 2, "blocks_without_fence": 4}
THREADS = {"blocks_without_fence": 1} | dict.fromkeys(
    [
        "missing_syncwarp",
        "shuffle_is_no_barrier",
        "syncwarp_of_half_a_warp",
        "shuffle_in_a_branch",
        "warp_waits_for_itself",
        "shuffle_from_a_lane_outside_its_mask",
        "mask_without_the_caller",
        "misaligned_ldmatrix",
    ],
    WARP,
)
ONE_WARP_OF_DATA = {  # they get n = 32
    "missing_syncwarp",
    "shuffle_is_no_barrier",
    "syncwarp_of_half_a_warp",
    "shuffle_in_a_branch",
    "warp_waits_for_itself",
}
SHARED_BYTES = {"misaligned_ldmatrix": 1024}


@pytest.fixture(scope="module", params=ORDERS)
def launcher(request: pytest.FixtureRequest) -> OneLibrary:
    return OneLibrary(check=True, order=request.param, seed=3, limit_s=0.5)


def run(launcher: OneLibrary, name: str, *options: str) -> None:
    """Launch a kernel of the zoo with suitable arguments."""
    size = 128 if name == "blocks_write_one_output" else 64
    x = np.linspace(1, 2, size, dtype=np.float32)
    y = np.zeros(size, np.float32)
    third: np.ndarray | np.generic = np.int32(WARP if name in ONE_WARP_OF_DATA else 64)
    if name == "blocks_without_fence":
        third = np.zeros(1, np.int32)
    if name == "uninitialised_scratch":
        third = np.zeros(64, np.float32)
        launcher.mark_uninitialised(third)
    kernel = launcher.kernel(str(ZOO), name, options)
    grid, block = (BLOCKS.get(name, 1),), (THREADS.get(name, 64),)
    kernel(grid, block, (x, y, third), SHARED_BYTES.get(name, 256))


def marked_lines(name: str) -> list[int]:
    """Return the lines of zoo.cu at which the kernel's bug may be reported."""
    lines, is_inside = [], False
    for number, line in enumerate(ZOO.read_text().splitlines(), 1):
        if line.startswith("__global__"):
            is_inside = f" {name}(" in line
        if is_inside and "<- caught" in line:
            lines.append(number)
    return lines


def test_the_table_names_every_kernel_of_the_zoo():
    assert plain_kernels(ZOO) == list(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_bug_is_reported_at_its_line(launcher: OneLibrary, name: str):
    with pytest.raises(KernelFault) as caught:
        run(launcher, name)
    message = str(caught.value)
    assert message.startswith(f"zoo.cu {name}: ")
    assert re.search(EXPECTED[name], message)
    thread = "" if "deadlock" in message else r", thread \(\d+,0,0\)"
    assert re.search(r"\[block \(\d,0,0\)" + thread, message)
    lines = marked_lines(name)
    assert any(f"zoo.cu:{line}" in message for line in lines) or not lines, message


@pytest.mark.parametrize("name", EXPECTED)
def test_the_repaired_kernel_passes(launcher: OneLibrary, name: str):
    run(launcher, name, "-DFIX")


@pytest.mark.parametrize("name", EXPECTED)
def test_the_repaired_kernel_passes_unchecked(name: str):
    run(OneLibrary(), name, "-DFIX")


@pytest.mark.parametrize(
    "name",
    [
        "divergent_barrier",
        "shuffle_in_a_branch",
        "copy_never_waited_for",
        "spin",
        "spin_on_an_atomic",
    ],
)
def test_some_bugs_are_reported_in_the_fast_build_too(name: str):
    with pytest.raises(KernelFault, match=EXPECTED[name]):
        run(OneLibrary(limit_s=0.5), name)


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("name", ["spin", "spin_on_an_atomic"])
def test_the_watchdog_finds_a_source_line_at_every_instruction(name: str, is_checked: bool):
    """It may strike in the kernel, or in a function of its library."""
    launcher = OneLibrary(check=is_checked, limit_s=0.001)
    with pytest.raises(KernelFault, match="watchdog"):
        run(launcher, name)
    image = launcher._runtime.mie_emu_fault_image().decode()
    command = ["objdump", "--disassemble", "--no-show-raw-insn", image]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    body = re.search(rf"<_ZL\d+{name}P.*?>:\n(.*?)\n\n", listing, re.DOTALL)
    assert body
    instructions = re.findall(r"^ *([0-9a-f]+):", body[1], re.MULTILINE)
    targets = re.findall(r"\t[a-z.]+\s+([0-9a-f]+) <", body[1])  # of direct calls and jumps
    assert len(instructions) > 10
    for address in {*instructions, *targets}:
        assert source_lines(image, int(address, 16)), f"no line for {address} in:\n{body[1]}"


def test_a_bad_address_does_not_end_the_process_of_the_fast_build():
    with pytest.raises(KernelFault, match="no memory at address"):
        run(OneLibrary(), "wild_pointer")
