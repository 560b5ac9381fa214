"""Check that every kernel compiles for every target with CuPy's options, within the ledger."""

from dataclasses import replace

import nvrtc_check
import pytest
from gpu.nvrtc_kernels import ENTRIES, SPILLS, Entry
from nvrtc_check import Nvrtc, Usage, growth, limits, read_ledger

from mie.ops_gpu.signature import SIGNATURES

QUICK = [("12.6", 87), ("13.4", 90)]
"""The targets of `make test`: the Orin under JetPack 6, and the H100."""
TARGETS = [(version, arch) for version, archs in nvrtc_check.TARGETS.items() for arch in archs]


@pytest.fixture(scope="module")
def compilers() -> dict[str, Nvrtc]:
    return nvrtc_check.installed()


def compiler(compilers: dict[str, Nvrtc], version: str) -> Nvrtc:
    if version not in compilers:
        pytest.skip(f"NVRTC {version} is not installed (pip install '.[nvrtc]')")
    return compilers[version]


def first_instances(entry: Entry) -> Entry:
    """Return the entry with only the first instance of each template."""
    first = {name.partition("<")[0]: name for name in reversed(entry.names)}
    return replace(entry, names=tuple(first.values()))


@pytest.mark.parametrize(
    ("version", "arch"), [pytest.param(*QUICK[0], marks=pytest.mark.slow), QUICK[1]]
)
def test_an_instance_of_each_kernel_keeps_to_the_ledger(compilers, version: str, arch: int):
    """Each compiler takes half of the files. The slow test below compiles everything."""
    half = ENTRIES[QUICK.index((version, arch)) :: len(QUICK)]
    entries = [first_instances(entry) for entry in half]
    report = nvrtc_check.compile_all(compiler(compilers, version), arch, entries)
    assert wrong(report, version, arch, whole=False) == []
    templates = {(entry.file, name.partition("<")[0]) for entry in half for name in entry.names}
    assert len(report) == len(templates)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "arch"), TARGETS)
def test_kernels_compile_and_keep_to_the_ledger(compilers, version: str, arch: int):
    report = nvrtc_check.compile_all(compiler(compilers, version), arch)
    assert wrong(report, version, arch, whole=True) == []


def wrong(report: nvrtc_check.Usages, version: str, arch: int, *, whole: bool) -> list[str]:
    """Return where kernels passed a limit, or need more than in the ledger.

    Kernels that are in the ledger and not in the report are wrong if it is the ``whole``.
    """
    ledger = read_ledger().get(nvrtc_check.target_name(version, arch), {})
    if not whole:
        ledger = {name: each for name, each in ledger.items() if name in report}
    return [*limits(report), *growth(report, ledger)]


def test_every_kernel_is_on_the_list():
    assert {name.partition("<")[0] for entry in ENTRIES for name in entry.names} >= {*SIGNATURES}


def test_the_ledger_has_each_kernel_that_may_spill():
    """A kernel that spills has a stack, so one that no longer does is noticed."""
    reports = read_ledger().values()
    for kernel in SPILLS:
        assert any(report[kernel].stack for report in reports), kernel


def test_the_ledger_has_every_target():
    targets = {nvrtc_check.target_name(version, arch) for version, arch in TARGETS}
    assert read_ledger().keys() == targets


# The gate can fail.

SPILLING = """
__global__ void __launch_bounds__(1024) spilling(volatile float* x) {  // 64 registers a thread
  float values[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) values[i] = x[i * 1024 + threadIdx.x];
#pragma unroll
  for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = values[95 - i];
}
"""


@pytest.mark.parametrize("version", nvrtc_check.TARGETS)
def test_a_spill_is_noticed(compilers, version: str):
    nvrtc = compiler(compilers, version)
    options = nvrtc_check.options_for(87)
    _, report = nvrtc_check.compile_file(nvrtc, SPILLING, ["spilling"], options)
    entry = Entry(file="spilling.cu", names=("spilling",))
    [sentence] = limits({"spilling.cu spilling": report["spilling"]}, [entry])
    assert "spills" in sentence


BEFORE = Usage(registers=40, shared=1024, stack=0)


@pytest.mark.parametrize(
    ("now", "found"),
    [
        (BEFORE, []),
        (Usage(registers=38, shared=0, stack=0), []),
        (
            Usage(registers=41, shared=1024, stack=0),
            ["k: registers grew from 40 to 41 (--update if it is worth it)"],
        ),
        (
            Usage(registers=40, shared=2048, stack=8),
            [
                "k: shared grew from 1024 to 2048 (--update if it is worth it)",
                "k: stack grew from 0 to 8 (--update if it is worth it)",
            ],
        ),
    ],
)
def test_a_kernel_that_grows_is_noticed(now: Usage, found: list[str]):
    assert list(growth({"k": now}, {"k": BEFORE})) == found


def test_a_block_that_exceeds_the_registers_is_noticed():
    entry = Entry(file="k.cu", names=("k",), threads=1024)
    assert list(limits({"k.cu k": Usage(registers=64, shared=0, stack=0)}, [entry])) == []
    assert list(limits({"k.cu k": Usage(registers=72, shared=0, stack=0)}, [entry])) == [
        "k.cu k: 72 registers do not fit 1024 threads"
    ]
