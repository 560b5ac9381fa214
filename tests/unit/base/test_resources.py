"""Test the CPUs and the memory that a process may use, in control groups of both versions."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.base import resources
from mie.base.resources import (
    LIBRARY_BYTES,
    THREAD_BYTES,
    Read,
    available_bytes,
    available_cpus,
    cpu_quota,
    usable_cpus,
)

MEMINFO = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       3\n"
GROUP_2 = "0::/a/b\n"
GROUP_1 = "5:memory:/a/b\n3:cpu,cpuacct:/a\n0::/ignored\n"


def of(texts: Mapping[str, object]) -> Read:
    return {name: str(text) for name, text in texts.items()}.get


@given(
    limits=st.lists(st.none() | st.integers(0, 1 << 40), min_size=3, max_size=3),
    uses=st.lists(st.integers(0, 1 << 40), min_size=3, max_size=3),
    caches=st.lists(st.integers(0, 1 << 40), min_size=3, max_size=3),
    version=st.sampled_from([1, 2]),
)
def test_the_tightest_group_of_the_path_limits_the_memory(limits, uses, caches, version) -> None:
    """The law, in both versions: the least of limit - use + page cache, and never below zero."""
    root = "/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup"
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
        2: ("memory.max", "memory.current", "file"),
    }[version]
    texts: dict[str, object] = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": GROUP_1 if version == 1 else GROUP_2,
    }
    for folder, limit, use, cache in zip(("/a/b", "/a", ""), limits, uses, caches, strict=True):
        path = f"{root}{folder}"
        texts[f"{path}/{names[0]}"] = "max" if limit is None else limit
        texts[f"{path}/{names[1]}"] = use
        texts[f"{path}/memory.stat"] = f"anon 5\n{names[2]} {cache}\nother {names[2]} 7\n"
    groups = zip(limits, uses, caches, strict=True)
    left = [limit - use + cache for limit, use, cache in groups if limit is not None]
    assert available_bytes(of(texts)) == max(0, min([8 << 30, *left]))


LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max data size             {data:<20} unlimited            bytes
Max address space         {address:<20} unlimited            bytes
"""


@given(
    address=st.just("unlimited") | st.integers(0, 1 << 40),
    data=st.just("unlimited") | st.integers(0, 1 << 40),
    size=st.integers(0, 1 << 30),
    written=st.integers(0, 1 << 30),
)
def test_the_limits_of_the_process_count_less_what_it_uses_already(address, data, size, written):
    texts = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/limits": LIMITS.format(address=address, data=data),
        "/proc/self/status": f"Name:\tx\nVmSize:\t {size} kB\nVmData:\t {written} kB\n",
    }
    uses = ((address, size << 10), (data, written << 10))
    reserve = LIBRARY_BYTES + THREAD_BYTES * usable_cpus()
    left = [limit - use - reserve for limit, use in uses if isinstance(limit, int)]
    assert available_bytes(of(texts)) == max(0, min([8 << 30, *left]))


@given(
    quotas=st.lists(st.none() | st.integers(1, 10**7), min_size=3, max_size=3),
    periods=st.lists(st.integers(1000, 10**6), min_size=3, max_size=3),
)
def test_the_smallest_quota_of_the_path_counts(quotas, periods) -> None:
    texts: dict[str, object] = {"/proc/self/cgroup": GROUP_2}
    for folder, quota, period in zip(("/a/b", "/a", ""), quotas, periods, strict=True):
        words = f"{'max' if quota is None else quota} {period}\n"
        texts[f"/sys/fs/cgroup{folder}/cpu.max"] = words
    ratios = [q / p for q, p in zip(quotas, periods, strict=True) if q is not None]
    assert cpu_quota(of(texts)) == (min(ratios) if ratios else None)


def test_the_affinity_and_the_quota_both_limit_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "usable_cpus", lambda: 6)
    texts = {"/proc/self/cgroup": GROUP_2, "/sys/fs/cgroup/a/cpu.max": "150000 100000"}
    assert available_cpus(of(texts)) == 2
    assert available_cpus(of({})) == 6
