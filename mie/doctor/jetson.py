"""Check a Jetson: its JetPack, and the power mode that limits its clocks."""

from __future__ import annotations

import re

from mie.doctor.survey import Finding, Survey, note, ok, problem, version_of
from mie.system.commands import CommandError

_JETPACKS = {"32": "4", "34": "5", "35": "5", "36": "6", "38": "7", "39": "7"}
"""JetPack by the major version of L4T, its Linux."""

_OLDEST_L4T = (36,)  # earlier releases have CUDA 11 and Python 3.8
_SUPER_L4T = (36, 4)  # JetPack 6.1


def _jetpack(survey: Survey) -> list[Finding]:
    """Check the version of JetPack. A container does not know it."""
    board, release = survey.board or "a Jetson", survey.l4t_release or ""
    match = re.search(r"^# R(\d+) \(release\), REVISION: (\d+(?:\.\d+)*)", release, re.MULTILINE)
    if match is None:
        why = "/etc/nv_tegra_release does not say; a container has none"
        return note(f"unknown, on {board} ({why})")
    l4t = f"{match[1]}.{match[2]}"
    version = _JETPACKS.get(match[1], "of a version unknown to mie")
    value = f"{version} (L4T {l4t}), on {board}"
    if version_of(l4t) < _OLDEST_L4T:
        remedy = "flash JetPack 6.2 or later, if the module is an Orin or newer"
        return problem(f"{value}: its CUDA is too old for CuPy", remedy)
    if version_of(l4t) < _SUPER_L4T:
        value += ": without the power modes of 25 W and MAXN SUPER"
        return note(value, "update to JetPack 6.2 or later")
    return ok(value)


def _power_mode(survey: Survey) -> list[Finding]:
    """Check that the board runs in its fastest power mode."""
    try:
        printed = survey.machine.run(["nvpmodel", "-q"], timeout=5.0)
    except CommandError as why:
        return note(f"unknown: nvpmodel {why}")
    match = re.search(r"NV Power Mode: *(\S+)", printed)
    if match is None:
        return note("unknown: nvpmodel does not say")
    # The modes without limits, as this module numbers them.
    modes = survey.machine.read("/etc/nvpmodel.conf") or ""
    fast = re.findall(r"^< *POWER_MODEL +ID=(\d+) +NAME=(MAXN\S*) *>", modes, re.M | re.I)
    number, fastest = max(fast, key=lambda mode: "SUPER" in mode[1].upper(), default=("", ""))
    if match[1].upper().startswith("MAXN") and match[1] == (fastest or match[1]):
        return ok(match[1])
    unnamed = "ID (/etc/nvpmodel.conf names the modes; MAXN is the fastest)"
    mode = f"{number} ({fastest})" if fastest else unnamed
    remedy = f"sudo nvpmodel -m {mode}, then sudo jetson_clocks, if power and cooling allow"
    return note(f"{match[1]}, which bounds the clocks of GPU and memory", remedy)


JETSON_CHECKS = {"JetPack": _jetpack, "power mode": _power_mode}
"""The checks in the order in which they are printed."""
