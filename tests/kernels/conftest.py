"""Divide the emulator's modes between `make test` and `make test-all`."""

from collections import defaultdict

import pytest

CHECKED = {"checked"}
GROUPS = (*(CHECKED, {"forward"}, CHECKED), *({"random"}, CHECKED, {"reverse"}, CHECKED))
"""The modes that `make test` runs, in turn. Each needs one build of a kernel, checked or plain.

There are seven, which shares no factor with the numbers of dtypes and widths. So each dtype and
width gets different groups.
"""
EVERY = 3
"""`make test` runs every third case of a test, beginning with another one in each test."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of `make test-all` as slow, among those that have all four modes.

    Kernels rarely change, and most of the time is that of building them. So `make test` runs every
    kernel in some mode, and `make test-all` every case in every mode. Cases of one shape get the
    same group in all tests, because they share a kernel, and then share its build.
    """
    cases: dict[str, dict[str, dict[str, pytest.Item]]] = defaultdict(lambda: defaultdict(dict))
    for item in items:
        if "mode" in (params := item.callspec.params if hasattr(item, "callspec") else {}):
            test, _, case = item.nodeid.partition("[")  # a test's name may contain a mode's
            cases[test][case.replace(params["mode"], "")][params["mode"]] = item
    shapes: dict[str, int] = {}
    for turn, of_test in enumerate(cases.values()):
        whole = [modes for modes in of_test.values() if modes.keys() >= set.union(*GROUPS)]
        for number, modes in enumerate(whole):
            shape = next(iter(modes.values())).callspec.params.get("shape")
            place, runs = turn + number, number % EVERY == turn % min(EVERY, len(whole))
            if shape is not None:
                place, runs = shapes.setdefault(str(shape), len(shapes)), True
            for mode in set.union(*GROUPS) - (GROUPS[place % len(GROUPS)] if runs else set()):
                modes[mode].add_marker(pytest.mark.slow)
