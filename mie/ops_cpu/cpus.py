"""The CPUs that this process really has."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

Read = Callable[[str], str | None]
"""The text of a file by its absolute path; None where there is none to read."""


def read_file(path: str) -> str | None:
    """The file's text, or None."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def available_cpus(read: Read = read_file) -> int:
    """CPUs that threads can run on at once, all the time: by affinity, and by the quota."""
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    return whole_cpus(usable, cpu_quota(read))


def whole_cpus(usable: int, quota: float | None) -> int:
    """Of ``usable`` CPUs, those whose time the control group allows, rounded up."""
    return usable if quota is None else max(1, min(usable, math.ceil(quota)))


def cpu_quota(read: Read = read_file) -> float | None:
    """CPUs whose time the process's control group may use; None without a limit."""
    quotas = []
    for text in group_files(read, "cpu", "cpu.max"):  # "150000 100000", or "max 100000"
        quotas.append(_ratio(text))
    times = group_files(read, "cpu", "cpu.cfs_quota_us")
    periods = group_files(read, "cpu", "cpu.cfs_period_us")
    for time, period in zip(times, periods, strict=False):
        quotas.append(_ratio(f"{time} {period}"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _ratio(text: str) -> float | None:
    """Time by period; no limit is "max", or a time of -1."""
    numbers = [int(word) for word in text.split() if re.fullmatch(r"\d+", word, re.ASCII)]
    return numbers[0] / numbers[1] if len(numbers) == 2 and min(numbers) > 0 else None


def group_files(read: Read, controller: str, name: str) -> list[str]:
    """The texts of a control group's file, from the process's own group up to the root's.

    A limit of any of them holds. Version 2 has one tree, version 1 one for each controller.
    """
    texts = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = PurePosixPath("/sys/fs/cgroup", controller if controllers else "")
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            text = read(str(top / folder / name))
            if text is not None:
                texts.append(text)
    return texts
