"""Count the CPUs that are available to this process."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

Read = Callable[[str], str | None]
"""Returns the text of a file by its absolute path, or None if it cannot be read."""


def read_file(path: str) -> str | None:
    """Return the file's text, or None."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def available_cpus(read: Read = read_file) -> int:
    """Return how many CPUs threads can use continuously, given the affinity and the quota."""
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    return whole_cpus(usable, cpu_quota(read))


def whole_cpus(usable: int, quota: float | None) -> int:
    """Return ``usable``, limited to the control group's quota rounded up."""
    return usable if quota is None else max(1, min(usable, math.ceil(quota)))


def cpu_quota(read: Read = read_file) -> float | None:
    """Return the CPU quota of the process's control group, or None without a limit."""
    quotas = []
    for text in group_files(read, "cpu", "cpu.max"):  # "150000 100000", or "max 100000"
        quotas.append(_ratio(text))
    times = group_files(read, "cpu", "cpu.cfs_quota_us")
    periods = group_files(read, "cpu", "cpu.cfs_period_us")
    for time, period in zip(times, periods, strict=False):
        quotas.append(_ratio(f"{time} {period}"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _ratio(text: str) -> float | None:
    """Return time divided by period. "max" or a time of -1 means no limit."""
    numbers = [int(word) for word in text.split() if re.fullmatch(r"\d+", word, re.ASCII)]
    return numbers[0] / numbers[1] if len(numbers) == 2 and min(numbers) > 0 else None


def group_files(read: Read, controller: str, name: str) -> list[str]:
    """Return the texts of a control group's file, from the process's own group up to the root.

    A limit of any of these groups applies. Version 2 has one tree, and version 1 has one tree for
    each controller.
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
