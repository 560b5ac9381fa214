"""What the host has left: memory that a program can get without pushing others out."""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")

_GROUP_FILES = (
    ("", "memory.max", "memory.current", "file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)
"""Of a control group, by version 2 and 1: the controller's folder, the limit, the use, and what of
that is the page cache, which is given back when it is wanted."""


def available_bytes(root: Path = ROOT) -> int:
    """Linux's MemAvailable, or less where a control group (a container) allows less.

    Elsewhere the machine's memory. ``root`` is where the files lie, for tests.
    """
    meminfo = _numbers(_read(root / "proc/meminfo"))
    if "MemAvailable" not in meminfo:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min(1024 * meminfo["MemAvailable"], *_group_rooms(root)))


def _group_rooms(root: Path) -> Iterator[int]:
    """What each of the process's control groups would still allow, up to the topmost."""
    yield 1 << 62  # so that there is always one
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller, limit_file, use_file, cache in _GROUP_FILES:
            if controller not in controllers.split(","):
                continue
            group = PurePosixPath(path.lstrip("/"))
            for folder in (group, *group.parents):
                found = root / "sys/fs/cgroup" / controller / folder
                limit, use = _read(found / limit_file).strip(), _read(found / use_file).strip()
                if limit.isdigit() and use.isdigit():  # a group without a limit says "max"
                    cached = _numbers(_read(found / "memory.stat")).get(cache, 0)
                    yield int(limit) - int(use) + cached


def _numbers(text: str) -> dict[str, int]:
    """The numbers of lines such as "MemAvailable:  123 kB" and "file 123"."""
    return {name: int(number) for name, number in re.findall(r"^(\w+):? +(\d+)", text, re.M)}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
