"""Share the set-up of the emulated GPU's tests: the reason to skip them, and launchers."""

import functools
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from mie.lab.sim.devices import find_device
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.host.emulator import EmulatedLauncher, Order

COMPILER = shlex.split(os.environ.get("CXX") or "g++")[0]
HAS_COMPILER = shutil.which(COMPILER) is not None

needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason=f"no C++ compiler: the emulator builds the kernels with {COMPILER}"
)


class QuickLauncher(EmulatedLauncher):
    """Builds kernels in a fraction of the time: unoptimised, and those without templates together.

    Unoptimised code accesses memory more often, so tests that count accesses take its base.
    """

    level = "-O0"

    def built_together(self, path: Path, name: str) -> Sequence[str]:
        plain = plain_kernels(path)
        return plain if name in plain else [name]


def plain_kernels(path: Path) -> list[str]:
    """Return the kernels of a file of tests that are no templates, in order."""
    pattern = r"^(template[^;{]*?)?__global__ void (?:__launch_bounds__\(.*\)\s)?(\w+)\("
    found = re.finditer(pattern, path.read_text(), re.MULTILINE)
    return [match[2] for match in found if match[1] is None]


@functools.cache
def launcher(check: bool = False, order: Order = "forward") -> EmulatedLauncher:
    """Return a cached launcher for each mode, so that a process opens every kernel once."""
    return QuickLauncher(check=check, order=order, seed=1)


def chip_of(device: str) -> Chip:
    """Return the chip of a device in the simulator's table."""
    gpu = find_device(device).gpu
    assert gpu is not None
    return Chip(num_multiprocessors=gpu.num_multiprocessors, shared_bytes=gpu.shared_bytes)
