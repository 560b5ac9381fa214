"""Break the sampler's kernels, one line at a time, and see that rows of logits notice it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import test_sampling
from emulated import needs_compiler
from planted import plant

from mie.ops_gpu.host.emulator import EmulatedLauncher
from mie.ops_gpu.sampling import PART
from mie.ops_gpu.signature import KernelFault

pytestmark = [needs_compiler, pytest.mark.slow]

MUTANTS = {
    "the highest id wins among equal parts": (
        "sampling.cuh",
        "if (a.key == b.key) return a.id < b.id ? a : b;",
        "if (a.key == b.key) return a.id > b.id ? a : b;",
    ),
    "the zeros differ": (
        "sampling.cuh",
        "return bits >= 0 ? bits : static_cast<int>(0x80000000u - static_cast<unsigned>(bits));",
        "return bits >= 0 ? bits : static_cast<int>(0x7fffffffu - static_cast<unsigned>(bits));",
    ),
    "a coefficient is off by its last bit": ("sampling.cuh", "0x1.62e430p-1f", "0x1.62e432p-1f"),
    "a product and a sum are rounded once": (
        "sampling.cuh",
        "__fmul_rn(__fadd_rn(power, 0x1.62e430p-1f), f);\n  power = __fadd_rn(power, 1.0f);",
        "__fmaf_rn(__fadd_rn(power, 0x1.62e430p-1f), f, 1.0f);",
    ),
    "a carry is lost": (
        "sampling.cuh",
        "if (atomicAdd(&low[bin], lower) > ~lower) ++upper;",
        "atomicAdd(&low[bin], lower);",
    ),
    "a bin is passed that just reaches the mass": (
        "sampling.cuh",
        "if (before < wanted && before + sums[k] >= wanted) {",
        "if (before <= wanted && before + sums[k] > wanted) {",
    ),
    "a nucleus may be empty": (
        "sampling.cuh",
        "return min(max(wanted, at_least), total);",
        "return min(wanted, total);",
    ),
    "the last bin is dropped": (
        "keep_candidates.cu",
        "((FIRST_BIN + last.bin + 1) << BIN_SHIFT)",
        "((FIRST_BIN + last.bin) << BIN_SHIFT)",
    ),
    "a candidate overwrites another": (
        "keep_candidates.cu",
        "__popc(kept & ((1u << lane) - 1))",
        "__popc(kept & ((1u << lane / 2) - 1))",
    ),
    "top-p keeps ties that top-k dropped": (
        "choose_tokens.cu",
        "found == before.order ? before.id : ~0u",
        "~0u",
    ),
    "one tie too many is kept": (
        "choose_tokens.cu",
        "sum - wanted < (is_count",
        "sum - wanted <= (is_count",
    ),
    "every token after the drawn one is drawn, too": (
        "choose_tokens.cu",
        "before + up_to > target && before + up_to - mass <= target;",
        "before + up_to > target;",
    ),
    "parts before the token's part count twice": (
        "choose_tokens.cu",
        "target - before,",
        "target,",
    ),
    "a later id replaces the lowest": (
        "find_largest.cu",
        "atomicMin(&lowest_id, i);",
        "lowest_id = i;",
    ),
    "a NaN is not the largest": (
        "find_largest.cu",
        "own = max_nan(own, to_float(x[i]));",
        "own = fmaxf(own, to_float(x[i]));",
    ),
    "an edit at the end of a part is made twice": (
        "edit_logits.cu",
        "ids[i] < end) edit",
        "ids[i] <= end) edit",
    ),
    "a part reads beyond its end": (
        "weigh_tokens.cu",
        "i + (AT_ONCE - 1) * PART_THREADS < end;",
        "i + (AT_ONCE - 1) * PART_THREADS <= end;",
    ),
    "unlikely tokens have no weight": (
        "weigh_tokens.cu",
        "(COUNT == COUNT_BINS && least >= LIKELY)",
        "(least >= LIKELY)",
    ),
}


@pytest.fixture
def folder(copied_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the kernels that the tests' launchers run."""
    launcher = EmulatedLauncher(order="reverse")
    monkeypatch.setattr(test_sampling, "launcher", lambda *_: launcher)
    return copied_kernels


def check_all() -> None:
    """Run tests of the sampler in float32."""
    for vocab_size in (40, 1000, PART + 1):
        test_sampling.test_random_controls_give_the_tokens_of_numpy("any", "float32", vocab_size)
    for vocab_size in (700, PART + 300):
        test_sampling.test_rows_at_the_border_of_two_tokens_give_the_tokens_of_numpy(vocab_size)
    test_sampling.test_top_k_1_is_greedy_and_constant_rows_are_cut_alike("any", "float32", 40)
    test_sampling.test_edits_at_the_borders_of_parts("any")
    rng = np.random.default_rng(51)
    for vocab_size in (33, PART + 77):
        logits = np.stack([test_sampling.hostile_logits(rng, vocab_size) for _ in range(60)])
        rows = [test_sampling.random_controls(rng, vocab_size) for _ in range(60)]
        test_sampling.check_rows("any", logits, rows)


def test_the_kernels_pass_unchanged(folder: Path):
    check_all()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_noticed(folder: Path, name: str):
    file, old, new = MUTANTS[name]
    plant(folder, file, old, new)
    with pytest.raises((AssertionError, KernelFault)):
        check_all()
