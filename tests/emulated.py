"""Provide what the tests of the emulated GPU share: the reason to skip them, and launchers."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mie.ops_gpu.host.emulator import EmulatedLauncher, Order

COMPILER = shlex.split(os.environ.get("CXX") or "g++")[0]
HAS_COMPILER = shutil.which(COMPILER) is not None

needs_compiler = pytest.mark.skipif(
    not HAS_COMPILER, reason=f"no C++ compiler: the emulator builds the kernels with {COMPILER}"
)


@functools.cache
def launcher(check: bool = False, order: Order = "forward") -> EmulatedLauncher:
    """Return a cached launcher for each mode, so that a process opens every kernel once."""
    from mie.ops_gpu.host.emulator import EmulatedLauncher

    return EmulatedLauncher(check=check, order=order, seed=1)
