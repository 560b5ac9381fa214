"""Check a Jetson: its JetPack, and the power mode that limits its clocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mie.doctor.machine import Machine, NoAnswer
from mie.doctor.report import Check, Version, dotted

_JETPACKS = {32: "4", 34: "5", 35: "5", 36: "6", 38: "7", 39: "7"}
"""JetPack by the major version of L4T, its Linux."""

_OLDEST_L4T = (36,)  # earlier releases have CUDA 11 and Python 3.8
_SUPER_L4T = (36, 4)  # JetPack 6.1


@dataclass(frozen=True, kw_only=True)
class Jetson:
    """What the machine reports about itself. None is unknown, as in a container."""

    module: str | None
    l4t: Version | None


def find_jetson(machine: Machine) -> Jetson | None:
    """Return the Jetson that this machine is, or None for another machine."""
    release = machine.read("/etc/nv_tegra_release")
    model = (machine.read("/proc/device-tree/model") or "").strip("\0\n ")
    is_jetson = re.search(r"jetson|tegra", model, re.IGNORECASE)
    if release is None and not is_jetson:
        return None
    match = re.search(r"^# R(\d+) \(release\), REVISION: (\d+(?:\.\d+)*)", release or "", re.M)
    l4t = tuple(map(int, f"{match[1]}.{match[2]}".split("."))) if match else None
    return Jetson(module=model or None, l4t=l4t)


def jetson_checks(machine: Machine, jetson: Jetson) -> Iterator[Check]:
    """Yield the checks in the order in which they are printed."""
    yield _jetpack(jetson)
    yield _power_mode(machine)


def _jetpack(jetson: Jetson) -> Check:
    module = jetson.module or "a Jetson"
    if jetson.l4t is None:
        value = f"unknown, on {module} (/etc/nv_tegra_release does not say; a container has none)"
        return Check(name="JetPack", status="note", value=value)
    jetpack = _JETPACKS.get(jetson.l4t[0])
    value = f"{jetpack or 'of a version unknown to mie'} (L4T {dotted(jetson.l4t)}), on {module}"
    if jetson.l4t < _OLDEST_L4T:
        return Check(
            name="JetPack",
            status="problem",
            value=f"{value}: its CUDA is too old for CuPy",
            remedy="flash JetPack 6.2 or later, if the module is an Orin or newer",
        )
    if jetson.l4t < _SUPER_L4T:
        return Check(
            name="JetPack",
            status="note",
            value=f"{value}: without the power modes of 25 W and MAXN SUPER",
            remedy="update to JetPack 6.2 or later",
        )
    return Check(name="JetPack", status="ok", value=value)


def _power_mode(machine: Machine) -> Check:
    try:
        printed = machine.run(["nvpmodel", "-q"], timeout=5.0)
    except NoAnswer as why:
        return Check(name="power mode", status="note", value=f"unknown: nvpmodel {why}")
    match = re.search(r"NV Power Mode: *(\S+)", printed)
    if match is None:
        return Check(name="power mode", status="note", value="unknown: nvpmodel does not say")
    fastest = _fastest_mode(machine)
    if match[1].upper().startswith("MAXN") and (fastest is None or match[1] == fastest[1]):
        return Check(name="power mode", status="ok", value=match[1])
    remedy = (
        f"sudo nvpmodel -m {fastest[0]} ({fastest[1]})"
        if fastest
        else "sudo nvpmodel -m ID (/etc/nvpmodel.conf names the modes; MAXN is the fastest)"
    )
    return Check(
        name="power mode",
        status="note",
        value=f"{match[1]}, which bounds the clocks of GPU and memory",
        remedy=f"{remedy}, then sudo jetson_clocks, if power and cooling allow",
    )


def _fastest_mode(machine: Machine) -> tuple[int, str] | None:
    """Return the number and the name of the mode without limits, as this module numbers them."""
    text = machine.read("/etc/nvpmodel.conf") or ""
    modes = re.findall(r"^< *POWER_MODEL +ID=(\d+) +NAME=(\S+) *>", text, re.MULTILINE)
    unbounded = [(int(number), name) for number, name in modes if name.upper().startswith("MAXN")]
    return max(unbounded, key=lambda mode: "SUPER" in mode[1].upper(), default=None)
