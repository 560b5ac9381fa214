"""Divide the modes of the emulator between `make test` and `make test-all`."""

import zlib
from collections import defaultdict

import pytest

PAIRS = ({"forward", "checked"}, {"reverse", "random"})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark half of the modes as slow for every case that has all four.

    A hash of the case's name chooses the pair that stays. So `make test` runs every case in two
    modes, and every mode over about half of the cases.
    """
    cases: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if "mode" in (params := item.callspec.params if hasattr(item, "callspec") else {}):
            cases[item.nodeid.replace(params["mode"], "")][params["mode"]] = item
    for name, modes in cases.items():
        if modes.keys() >= PAIRS[0] | PAIRS[1]:
            for mode in PAIRS[zlib.crc32(name.encode()) % 2]:
                modes[mode].add_marker(pytest.mark.slow)
