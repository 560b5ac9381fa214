"""Check the protocol of the threads of the `jit` backend in every interleaving."""

import re
from collections import Counter
from pathlib import Path

import pytest
from interleavings import SOURCE, Case, Explorer, Violation
from toml_files import read_toml

pytest.importorskip("numba")

from mie.ops_jit.compiler import Cpu, assembly, host_cpu, intermediate_code
from mie.ops_jit.kernels import team as kernels
from mie.ops_jit.layout import INSTRUCTION_SHIFT, RUN_SHIFT

CASES = {
    "three short runs": Case([[1], [1], [1]]),
    "runs that nobody is woken for": Case([[2], [1]], woken=0),
    "the number of the run wraps": Case([[2], [1], [2]], first_run=(1 << 23) - 2),
    "the same ticket comes again": Case([[2], [2], [2]], num_runs=2),
    "instructions without tiles": Case([[0, 1, 0], [0], [], [2]]),
    "delayed stores": Case([[2, 1], [1]], delayed=True),
    "several tiles at once": Case([[5], [1]], share_shift=1),
    "two runs": Case([[2, 1], [1, 2]]),
    "a worker that is not woken": Case([[1], [1]], workers=2, woken=1),
    "two workers": Case([[2, 1]], workers=2),
}
"""The smaller ones first, which find most mistakes."""
LONG_CASES = {
    "one run of two pairs": Case([[2, 2]], workers=2),
    "two runs": Case([[2, 1], [1, 2]], workers=2),
    "delayed stores": Case([[2, 1]], workers=2, delayed=True),
    "three instructions": Case([[1, 3, 2]], workers=2),
    "several tiles at once": Case([[5, 2]], workers=2, share_shift=1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_protocol_keeps_its_promises_in_every_interleaving(name: str) -> None:
    """Every tile is done once, instructions in order. No thread waits forever, or is needed."""
    assert Explorer(CASES[name]).check() > 500


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_CASES)
def test_the_protocol_keeps_its_promises_in_every_long_interleaving(name: str) -> None:
    assert Explorer(LONG_CASES[name]).check() > 50_000


TABLE = Path(__file__).parents[2] / "planted/team.toml"
MISTAKES = read_toml(TABLE)["mistake"]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake["name"])
def test_a_mistake_in_the_protocol_is_noticed(mistake: dict[str, str]) -> None:
    source = SOURCE.read_text()
    assert source.count(mistake["old"]) == 1
    mistaken = source.replace(mistake["old"], mistake["new"])
    assert any(is_broken(case, mistaken) for case in CASES.values())


def is_broken(case: Case, source: str) -> bool:
    try:
        Explorer(case, source).check()
    except Violation:
        return True
    return False


def test_numbers_of_runs_fill_the_bits_of_the_ticket() -> None:
    assert kernels.LAST_RUN << RUN_SHIFT < 1 << 63
    assert (kernels.LAST_RUN + 1) << RUN_SHIFT == 1 << 63
    assert INSTRUCTION_SHIFT < RUN_SHIFT


ARM = Cpu("aarch64-unknown-linux-gnu", "cortex-a78", "")
ATOMIC = r"(load atomic|store atomic|cmpxchg|atomicrmw \w+) .*?(acquire|monotonic|seq_cst|release)"


@pytest.mark.parametrize("kernel", ["run", "work"])
def test_the_compiled_protocol_orders_memory_as_the_model_does(kernel: str) -> None:
    """Plain loads and stores may be delayed. Those of tickets, flags and counts may not."""
    code = intermediate_code(kernel, host_cpu())
    orders = {tuple(found) for found in re.findall(ATOMIC, code)}
    assert orders == {
        ("load atomic", "acquire"),
        ("store atomic", "seq_cst"),
        ("cmpxchg", "seq_cst"),
        ("atomicrmw xchg", "seq_cst"),
        ("atomicrmw add", "seq_cst"),
    }
    # The same code on a CPU that does delay them.
    code = re.sub(r".*@llvm\.x86\.sse2\.pause\(\).*\n", "", code)
    found = Counter(re.findall(r"\b(ldapr|stlr|casal|swpal|ldaddal)\b", assembly(code, ARM)))
    assert found["ldapr"] >= 3
    assert found["stlr"] >= 1
    assert (found["casal"], found["ldaddal"]) == (1, 1)
    assert found["swpal"] == (1 if kernel == "run" else 2)
