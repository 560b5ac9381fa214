"""Kernels compiled for CPUs that are not at hand: their inner loops are read."""

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

if importlib.util.find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)

from mie.ops_jit.compiler import Cpu, assembly, intermediate_code

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
CPUS = {
    "haswell": Cpu(X86, "haswell", "+avx2,+fma,+f16c"),
    "znver3": Cpu(X86, "znver3", "+avx2,+fma,+f16c"),
    "znver4": Cpu(X86, "znver4", "+avx2,+fma,+f16c,+avx512f"),
    "sapphirerapids": Cpu(X86, "sapphirerapids", "+avx2,+fma,+f16c,+avx512f"),
    "cortex-a78": Cpu(ARM, "cortex-a78", ""),
    "neoverse-v2": Cpu(ARM, "neoverse-v2", ""),
}
EACH_WIDTH = ("haswell", "znver4", "cortex-a78")
"""A CPU of each width of vectors, and so of each code that Numba makes."""


class Registers(NamedTuple):
    """The vector registers of a kind of CPU."""

    like: Cpu
    """The CPU for which Numba makes the code."""
    name: re.Pattern[str]
    sums: int
    """How many of them the largest tile fills with sums."""


FMA = re.compile(r"\s(vfn?madd\d+ps\s|fmla\s)")
AVX512 = Registers(CPUS["znver4"], re.compile(r"%zmm"), 24)
AVX2 = Registers(CPUS["haswell"], re.compile(r"%ymm"), 12)
NEON = Registers(CPUS["cortex-a78"], re.compile(r"\bv\d+\.4s"), 20)
STACK = re.compile(r"\(%rsp\)|\[sp")
TO_STACK = re.compile(r"%[xyz]mm\d+, \S*\(%rsp\)$|\sst[rp]\s.*\[sp")
VECTOR = re.compile(r"%[xyz]mm|\b[qv]\d+")
EACH_CPU = pytest.mark.parametrize(
    "cpu",
    [
        pytest.param(cpu, id=name, marks=[] if name in EACH_WIDTH else [pytest.mark.slow])
        for name, cpu in CPUS.items()
    ],
)
NAMED_CALL = re.compile(r"^\s+(?:callq?|bl|jmp)\s+([A-Za-z_]\w*)", re.MULTILINE)


def registers_of(cpu: Cpu) -> Registers:
    if cpu.triple == ARM:
        return NEON
    return AVX512 if "avx512" in cpu.features else AVX2


@cache
def code_like(kernel: str, like: Cpu) -> str:
    return intermediate_code(kernel, like)


def code_for(kernel: str, cpu: Cpu) -> str:
    return assembly(code_like(kernel, registers_of(cpu).like), cpu)


def inner_loops(code: str) -> Iterator[list[str]]:
    """Yield the instructions of loops that contain no label, and so no other loop."""
    lines = [re.split(r"\s+[#;]|//", line)[0].rstrip() for line in code.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    for i, line in enumerate(lines):
        jump = re.match(r"\s+(?:j\w+|b\.\w+|cbn?z|tbn?z)\s+(?:.*\s)?(\.L\w+)$", line)
        start = labels.get(jump[1], i) if jump else i
        if start < i and not any(label.endswith(":") for label in lines[start + 1 : i]):
            yield lines[start + 1 : i + 1]


def product_loops(kernel: str, cpu: Cpu, spill: re.Pattern[str] = STACK) -> list[list[str]]:
    """Return the loops with multiply-adds, which are vectors' and do not spill one."""
    loops = [
        loop
        for loop in inner_loops(code_for(kernel, cpu))
        if any(FMA.search(line) for line in loop)
    ]
    # Every shape of a tile is a loop, but those whose code is equal may share one.
    assert len(loops) >= 3
    for loop in loops:
        sums = [line for line in loop if FMA.search(line)]
        assert all(registers_of(cpu).name.search(line) for line in sums), loop
        spills = [line for line in loop if spill.search(line) and VECTOR.search(line)]
        assert not spills, (len(sums), spills)
    return loops


@EACH_CPU
@pytest.mark.parametrize(
    "dtype",
    ["float32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bfloat16", "float16"))],
)
def test_products_are_vector_multiply_adds_without_spills(cpu: Cpu, dtype: str):
    loops = product_loops(f"multiply[{dtype}]", cpu)
    most = max(sum(bool(FMA.search(line)) for line in loop) for loop in loops)
    assert most == registers_of(cpu).sums


QUANTISED = (
    "int4-g32-offsets",
    "int4-g32-offsets-units",
    "int4-g128",
    "int8-g32",
    "int8-g16-offsets",
    "int8-g16-units",
    "float8_e4m3fn-g128",
)


@pytest.mark.few
@EACH_CPU
@pytest.mark.parametrize(
    "dtype",
    [*QUANTISED[:1], *(pytest.param(each, marks=pytest.mark.slow) for each in QUANTISED[1:])],
)
def test_quantised_products_are_vector_multiply_adds_without_spills(cpu: Cpu, dtype: str):
    # A loop may read constants and scales from the stack, which were computed before it.
    product_loops(f"multiply[{dtype}]", cpu, spill=TO_STACK)


DOTS = {
    "AVX-512 VNNI": (
        Cpu(X86, "znver4", CPUS["znver4"].features + ",+avx512vnni"),
        "vpdpbusd.*%zmm",
    ),
    "AVX-VNNI": (Cpu(X86, "alderlake", CPUS["haswell"].features + ",+avxvnni"), "vpdpbusd.*%ymm"),
    "AVX2": (CPUS["haswell"], "vpmaddubsw.*%ymm"),
    "AVX-512 without VNNI": (
        Cpu(X86, "skylake-avx512", CPUS["znver4"].features + ",+avx512bw"),
        "vpmaddubsw.*%ymm",
    ),
    "Armv8.2": (Cpu(ARM, "cortex-a78", "+dotprod"), r"\ssdot\s.*, v\d+\.4b\[\d\]"),
    "Armv8.0": (Cpu(ARM, "cortex-a72", ""), r"\smla\s+v|\smul\s+v"),
}
"""Kinds of CPUs that multiply bytes, and the instructions with which they do."""
INTEGERS = (
    *("int4-g32-offsets", "int8-g16-units-words", "int4-g128", "int8-g32-offsets-words"),
    *("int8-g32-halves-sextets", "int8-g16-units-sextets"),
)


@pytest.mark.few
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=[] if kind in ("AVX-512 VNNI", "AVX2", "Armv8.2") else [pytest.mark.slow]
        )
        for kind in DOTS
    ],
)
@pytest.mark.parametrize(
    "dtype", [*INTEGERS[:1], *(pytest.param(each, marks=pytest.mark.slow) for each in INTEGERS[1:])]
)
def test_integer_products_are_the_dots_of_a_cpu_and_spill_little(kind: str, dtype: str):
    cpu, pattern = DOTS[kind]
    code = assembly(code_like(f"multiply_int8[{dtype}]", cpu), cpu)
    loops = 0
    for loop in inner_loops(code):
        if dots := sum(bool(re.search(pattern, line)) for line in loop):
            loops += 1
            spills = [line for line in loop if TO_STACK.search(line)]
            # Loads in a fixed order, as on x86, would take more instructions on Arm than spills.
            assert len(spills) <= dots / (4 if kind == "Armv8.2" else 10), (dots, spills)
            assert len(loop) < 10 * dots + 40
    assert loops >= 4
    own = set(re.findall(r"^(\w+):", code, re.MULTILINE))
    assert set(NAMED_CALL.findall(code)) <= own


QUICK = ("znver4", "cortex-a78")


@pytest.mark.parametrize(
    "cpu",
    [
        pytest.param(cpu, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, cpu in CPUS.items()
    ],
)
@pytest.mark.parametrize("kernel", ["rms_norm", "gate_mul", "rope_write[float16]"])
@pytest.mark.few
def test_kernels_call_no_library(cpu: Cpu, kernel: str):
    code = code_for(kernel, cpu)
    own = set(re.findall(r"^(\w+):", code, re.MULTILINE))
    assert set(NAMED_CALL.findall(code)) <= own


def test_a_spill_would_be_noticed():
    code = ".L1:\n\tvfmadd231ps\t%ymm1, %ymm2, %ymm3\n\tvmovups\t%ymm3, 32(%rsp)\n\tjne\t.L1\n"
    (loop,) = inner_loops(code)
    assert any(STACK.search(line) and VECTOR.search(line) for line in loop)
