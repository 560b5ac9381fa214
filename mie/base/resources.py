"""Count the CPUs, the bytes of memory and the open files that this process may have.

A control group, such as a container, may allow less than the machine has, and so may a limit of the
process itself (``ulimit -v`` and ``-d``). A limit of any group
applies, from the process's own group up to the root. Version 2 has one tree of groups, and version
1 has one tree for each controller.
"""

import math
import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

Read = Callable[[str], str | None]
"""Returns the text of a file by its absolute path, or None if it cannot be read."""

_MEMORY_FILES = (
    ("memory.max", "memory.current", "file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)
"""The limit, the use, and the entry of memory.stat that counts the page cache, by version 2 and 1.

The kernel reclaims the page cache when a process needs the memory.
"""

_PROCESS_LIMITS = (("Max address space", "VmSize"), ("Max data size", "VmData"))
"""The limits in /proc/self/limits, and the amounts in /proc/self/status that count towards them."""

LIBRARY_BYTES, THREAD_BYTES = 160 << 20, 16 << 20
"""Bytes that a limit of the process must leave beside the arrays of an engine, in all and per CPU.

BLAS reserves a buffer of 66 MiB at its first product, and malloc keeps memory that the steps of
each thread have freed. Both count towards a limit even where no page is touched.
"""

MOST_FILES = 1 << 16
"""Maximum of open files that `raise_open_files` sets."""


def raise_open_files() -> int:
    """Raise the limit of open files as far as the process may, and return it.

    Connections count as open files, and shells often begin with a limit of 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MOST_FILES if hard == unlimited else min(hard, MOST_FILES)
    if soft == unlimited or soft >= wanted:
        return soft
    with suppress(ValueError, OSError):  # some systems have a lower limit than they tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def read_text(path: str) -> str | None:
    """Return the file's text, or None."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None


def usable_cpus() -> int:
    """Return how many CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_cpus(read: Read = read_text) -> int:
    """Return how many CPUs threads can use continuously, given the affinity and the quota."""
    return whole_cpus(usable_cpus(), cpu_quota(read))


def whole_cpus(usable: int, quota: float | None) -> int:
    """Return ``usable``, limited to the control group's quota rounded up."""
    return usable if quota is None else max(1, min(usable, math.ceil(quota)))


def cpu_quota(read: Read = read_text) -> float | None:
    """Return the CPU quota of the process's control group, or None without a limit."""
    quotas = []
    for group in _groups(read, "cpu"):
        text = read(f"{group}/cpu.max")  # "150000 100000", or "max 100000"
        if text is None:
            text = f"{read(f'{group}/cpu.cfs_quota_us')} {read(f'{group}/cpu.cfs_period_us')}"
        quotas.append(_ratio(text))
    return min((quota for quota in quotas if quota is not None), default=None)


def available_bytes(read: Read = read_text) -> int:
    """Return how many bytes a program can allocate without swapping out others.

    This is Linux's MemAvailable, or the least that a control group or a limit of the process leaves
    if that is less. Other systems report only the machine's memory.
    """
    available = memory_info(read).get("MemAvailable")
    if available is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([available, *_left_by_groups(read), *_left_by_process_limits(read)]))


def memory_info(read: Read = read_text) -> dict[str, int]:
    """Return the amounts in /proc/meminfo, in bytes: MemTotal, MemAvailable and more."""
    found = re.findall(r"^(\w+): +(\d+) kB$", read("/proc/meminfo") or "", re.MULTILINE)
    return {name: int(number) << 10 for name, number in found}


def _left_by_groups(read: Read) -> Iterator[int]:
    """Yield the bytes that each control group with a limit leaves."""
    for group in _groups(read, "memory"):
        for limit_file, use_file, cache in _MEMORY_FILES:
            limit = _number(read(f"{group}/{limit_file}"))
            if limit is not None:
                use = _number(read(f"{group}/{use_file}")) or 0
                stat = read(f"{group}/memory.stat") or ""
                cached = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
                yield limit - use + int(cached[1] if cached else 0)


def _left_by_process_limits(read: Read) -> Iterator[int]:
    """Yield the bytes that each limit of the process leaves to arrays, or a negative number."""
    limits, status = read("/proc/self/limits") or "", read("/proc/self/status") or ""
    reserve = LIBRARY_BYTES + THREAD_BYTES * usable_cpus()
    for limit_name, use_name in _PROCESS_LIMITS:
        limit = re.search(rf"^{limit_name} +(\d+) ", limits, re.MULTILINE)
        use = re.search(rf"^{use_name}:\s+(\d+) kB$", status, re.MULTILINE)
        if limit and use:
            yield int(limit[1]) - (int(use[1]) << 10) - reserve


def _groups(read: Read, controller: str) -> Iterator[PurePosixPath]:
    """Yield the folders of the process's control groups, from its own up to the root."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers or controller in controllers.split(","):
            root = PurePosixPath("/sys/fs/cgroup", controller if controllers else "")
            group = PurePosixPath(path.lstrip("/"))
            yield from (root / folder for folder in (group, *group.parents))


def _number(text: str | None) -> int | None:
    """Return the number that ``text`` is, or None. "max" means no limit."""
    return int(text) if text is not None and text.strip().isdecimal() else None


def _ratio(text: str) -> float | None:
    """Return time divided by period. "max" or a time of -1 means no limit."""
    numbers = [int(word) for word in text.split() if re.fullmatch(r"\d+", word, re.ASCII)]
    return numbers[0] / numbers[1] if len(numbers) == 2 and min(numbers) > 0 else None
