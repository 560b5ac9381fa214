"""Check the protocol of the threads of the `jit` backend in every interleaving."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from interleavings import SOURCE, Case, Explorer, Violation

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
}


@pytest.mark.parametrize("name", CASES)
def test_the_protocol_keeps_its_promises_in_every_interleaving(name: str) -> None:
    """Every tile is done once, instructions in order. No thread waits forever, or is needed."""
    assert Explorer(CASES[name]).check() > 500


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_CASES)
def test_the_protocol_keeps_its_promises_in_every_long_interleaving(name: str) -> None:
    assert Explorer(LONG_CASES[name]).check() > 50_000


COUNT = "if fetch_add(done_at, 1) + 1 == tiles:"
RESET = """\
                set_word(team, DONE, 0)
                release(ticket_at, next_ticket(team, run, instruction + 1))
"""
SLEEP = """\
                if acquire(ticket_at) >> RUN_SHIFT == run or exchange(at, 0) == 0:
"""
LOOK = """\
                # The first to clear the flag decides: this worker, or the caller of a new run.
"""
WAKE = """\
        if exchange(at, 0) == 1:
            call_c(word(team, POST), at + SEMAPHORE * 8)
"""
WORKERS = """\
    for worker in range(workers):
        at = team + (SLEEPERS + worker * WORKER_WORDS) * 8
"""
START = """\
    release(team + TICKET * 8, next_ticket(team, run, first))
"""
MISTAKES = {
    "the number of tiles is read after the count": (
        COUNT,
        "if fetch_add(done_at, 1) + 1 == word(team, TILES):",
    ),
    "the count is not atomic": (
        "            if fetch_add(done_at, 1) + 1 == tiles:",
        "            done = acquire(done_at) + 1\n"
        "            release(done_at, done)\n"
        "            if done == tiles:",
    ),
    "the count is reset after the ticket is set": (
        RESET,
        "".join(RESET.splitlines(keepends=True)[::-1]),
    ),
    "the count is not reset": (RESET, RESET.splitlines(keepends=True)[1]),
    "an instruction ends with its last tile begun": (COUNT, "if left == 1:"),
    "an instruction ends one tile early": (COUNT, "if fetch_add(done_at, 1) + 2 == tiles:"),
    "a tile is taken without comparing": (
        "            if swap_if(ticket_at, ticket, ticket - 1) == 0:\n                continue\n",
        "            release(ticket_at, ticket - 1)\n",
    ),
    "a tile is taken although another thread took it": (
        "            if swap_if(ticket_at, ticket, ticket - 1) == 0:\n                continue\n",
        "            swap_if(ticket_at, ticket, ticket - 1)\n",
    ),
    "the first tile is skipped": (
        "word(team, HEADER), left - 1, scratch",
        "word(team, HEADER), left, scratch",
    ),
    "an instruction is skipped": (
        "next_ticket(team, run, instruction + 1))",
        "next_ticket(team, run, instruction + 2))",
    ),
    "the number of the run stays": (
        "(acquire(team + TICKET * 8) >> RUN_SHIFT) + 1)",
        "(acquire(team + TICKET * 8) >> RUN_SHIFT))",
    ),
    "the number of the run does not wrap": (" & LAST_RUN", ""),
    "the program is set after the ticket": (
        "    set_word(team, PROGRAM, program)\n    set_word(team, HEADER, header)\n"
        "    set_word(team, END, end)\n" + START,
        START + "    set_word(team, PROGRAM, program)\n    set_word(team, HEADER, header)\n"
        "    set_word(team, END, end)\n",
    ),
    "the ticket is a plain store": (
        START,
        START.replace("release(team + TICKET * 8", "set_word(team, TICKET"),
    ),
    "the number of tiles is stored after the ticket": (
        RESET,
        "                set_word(team, DONE, 0)\n"
        "                ticket = next_ticket(team, run, instruction + 1)\n"
        "                release(ticket_at, ticket)\n"
        "                set_word(team, TILES, ticket & ((1 << INSTRUCTION_SHIFT) - 1))\n",
    ),
    "a worker sleeps without looking again": (SLEEP, "                if True:\n"),
    "a worker looks before it says that it sleeps": (
        "exchange(at, 1)\n" + LOOK + SLEEP,
        "if acquire(ticket_at) >> RUN_SHIFT == run:\n                    exchange(at, 1)\n",
    ),
    "a worker takes back what the caller has cleared": (
        SLEEP,
        "                if acquire(ticket_at) >> RUN_SHIFT == run or exchange(at, 0) == 1:\n",
    ),
    "the caller forgets to post": (WAKE, "        exchange(at, 0)\n"),
    "the caller wakes before it sets the ticket": (START + WORKERS + WAKE, WORKERS + WAKE + START),
    "the last worker is not woken": (
        "for worker in range(workers):",
        "for worker in range(workers - 1):",
    ),
    "the end is one instruction late": (
        "instruction >= word(team, END):",
        "instruction > word(team, END):",
    ),
    "a worker does not stop": (" and acquire(team + STOP * 8) == 0:", ":"),
    "an instruction without tiles is not skipped": (
        "        if tiles > 0:\n",
        "        if tiles >= 0:\n",
    ),
}
"""Planted mistakes, each a replacement in the kernels' source."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_protocol_is_noticed(name: str) -> None:
    old, new = MISTAKES[name]
    source = SOURCE.read_text()
    assert source.count(old) == 1
    assert any(is_broken(case, source.replace(old, new)) for case in CASES.values())


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
