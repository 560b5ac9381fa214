"""Divide the emulator's modes between `make test` and `make test-all`, and copy the kernels."""

import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from mie.ops_gpu.host import emulator
from mie.ops_gpu.source import KERNELS

CHECKED = {"checked"}
GROUPS = (
    *(CHECKED, CHECKED, {"forward"}, CHECKED),
    *({"random"}, CHECKED, {"reverse"}),
)
"""The modes that `make test` runs. Each group needs one build of a kernel, checked or plain.

There are seven, which shares no factor with the numbers of dtypes and widths. So each dtype and
width gets different groups.
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the modes outside a case's group as slow, for every case that has all four.

    The cases of a test get the groups in turn. Cases of one shape get the same group in all tests,
    because they share a kernel, and then share its build. So `make test` runs every case, and every
    mode over a part of them.
    """
    cases: dict[tuple[str, str], dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if "mode" in (params := item.callspec.params if hasattr(item, "callspec") else {}):
            test, _, case = item.nodeid.partition("[")  # a test's name may contain a mode's
            cases[test, case.replace(params["mode"], "")][params["mode"]] = item
    places: dict[str, dict[str, int]] = defaultdict(dict)
    for (test, case), modes in cases.items():
        if modes.keys() >= set.union(*GROUPS):
            shape = next(iter(modes.values())).callspec.params.get("shape")
            turns = places[test if shape is None else "shape"]
            place = turns.setdefault(case if shape is None else str(shape), len(turns))
            for mode in set.union(*GROUPS) - GROUPS[place % len(GROUPS)]:
                modes[mode].add_marker(pytest.mark.slow)


@pytest.fixture
def copied_kernels(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return the folder of a copy of the kernels, which the emulator runs instead of them."""
    # The same path for every test, so that only what a planted bug changes is compiled again.
    path = tmp_path_factory.getbasetemp() / "kernels"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(KERNELS, path)
    monkeypatch.setattr(emulator, "KERNELS", path)
    return path
