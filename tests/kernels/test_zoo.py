"""Test the bug zoo: the checked build reports each planted bug at its line, and accepts the fix.

A checker that misses a kind of bug, or reports a false one, fails here before it misleads about a
kernel.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from emulated import QuickLauncher, needs_compiler, plain_kernels
from toml_files import read_toml

from mie.ops_gpu.host.emulator import ORDERS
from mie.ops_gpu.launcher import KernelFault

ZOO = Path(__file__).with_name("zoo.cu")
REPORTS = Path(__file__).parents[1] / "planted/zoo.toml"

pytestmark = needs_compiler

BUGS = read_toml(REPORTS)


@pytest.fixture(
    scope="module",
    params=[ORDERS[0], *(pytest.param(order, marks=pytest.mark.slow) for order in ORDERS[1:])],
)
def launcher(request: pytest.FixtureRequest) -> QuickLauncher:
    return QuickLauncher(check=True, order=request.param, seed=3, limit_s=0.1)


def run(launcher: QuickLauncher, name: str, *options: str) -> None:
    """Launch a kernel of the zoo with suitable arguments."""
    bug = BUGS[name]
    size = bug.get("size", 64)
    x = np.linspace(1, 2, size, dtype=np.float32)
    y = np.zeros(size, np.float32)
    third: np.ndarray | np.generic = np.int32(bug.get("n", 64))
    if name == "blocks_without_fence":
        third = np.zeros(1, np.int32)
    if name == "uninitialised_scratch":
        third = np.zeros(64, np.float32)
        launcher.mark_uninitialised(third)
    kernel = launcher.kernel(str(ZOO), name, options)
    grid, block = (bug.get("blocks", 1),), (bug.get("threads", 64),)
    kernel(grid, block, (x, y, third), bug.get("shared_bytes", 256))


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
    assert plain_kernels(ZOO) == list(BUGS)


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_reported_at_its_line(launcher: QuickLauncher, name: str):
    with pytest.raises(KernelFault) as caught:
        run(launcher, name)
    message = str(caught.value)
    assert message.startswith(f"zoo.cu {name}: ")
    assert re.search(BUGS[name]["report"], message)
    thread = "" if "deadlock" in message else r", thread \(\d+,0,0\)"
    assert re.search(r"\[block \(\d,0,0\)" + thread, message)
    lines = marked_lines(name)
    assert any(f"zoo.cu:{line}" in message for line in lines) or not lines, message


@pytest.mark.parametrize("name", BUGS)
def test_the_repaired_kernel_passes(launcher: QuickLauncher, name: str):
    run(launcher, name, "-DFIX")


@pytest.mark.parametrize("name", BUGS)
def test_the_repaired_kernel_passes_unchecked(name: str):
    run(QuickLauncher(), name, "-DFIX")


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
    with pytest.raises(KernelFault, match=BUGS[name]["report"]):
        run(QuickLauncher(limit_s=0.1), name)


def test_a_bad_address_does_not_end_the_process_of_the_fast_build():
    with pytest.raises(KernelFault, match="no memory at address"):
        run(QuickLauncher(), "wild_pointer")
