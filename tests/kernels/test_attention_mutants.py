"""Break the kernels of attention, caches and log-probabilities, one line at a time.

    python -m pytest tests/kernels/test_attention_mutants.py -v -n0

prints a line for each planted bug: PASSED if a check notices it. The bugs of the sampler are in
test_sampler_mutants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import test_bfloat16_range
import test_kernels
import test_nonfinite
import test_prefill
import test_prefill_splits
import test_sampling
from emulated import needs_compiler
from planted import plant
from test_kernels import Shape

from mie.ops_gpu.chip import Chip
from mie.ops_gpu.dispatch import TILE_TOKENS
from mie.ops_gpu.host.emulator import EmulatedLauncher
from mie.ops_gpu.signature import KernelFault

pytestmark = [needs_compiler, pytest.mark.slow]

Check = Callable[[], None]
FEW_BLOCKS = Chip(num_multiprocessors=3, shared_bytes=0)


def shape_of(
    stored: str, window: int | None = None, dtype: str = "float16", head_dim: int = 64
) -> Shape:
    return Shape(
        dtype=dtype,
        head_dim=head_dim,
        group=3,
        num_kv_heads=1,
        block_size=32,
        window=window,
        stored=stored,
    )


def decode(shape: Shape, *, is_deterministic: bool, query_scale: float = 1.0) -> None:
    """Decode a sequence of two splits and several runs, beside short ones."""
    lengths = [1, 17, 65, test_kernels.SPLIT_TOKENS + 69]
    test_kernels.attend(
        "any",
        shape,
        [(1, length) for length in lengths],
        is_deterministic,
        FEW_BLOCKS,
        query_scale,
    )


def streamed(stored: str, **settings: float) -> Check:
    return partial(decode, shape_of(stored), is_deterministic=False, **settings)


def split(stored: str, window: int | None = None, **settings: float) -> Check:
    return partial(decode, shape_of(stored, window), is_deterministic=True, **settings)


def prefill(stored: str, window: int | None = None) -> Check:
    sequences = [(40, 80), (17, 150), (2, 66)]  # a warp's rows are on both sides of a tile's end
    return partial(test_prefill.prefill, "any", shape_of(stored, window), sequences, 1.0)


def split_prefill(stored: str, window: int | None = None, query_scale: float = 1.0) -> Check:
    sequences = [(40, 215), (17, 150), (100, 130)]

    def check() -> None:
        launcher = EmulatedLauncher(order="random")  # blocks of several sequences take turns
        with test_prefill_splits.splits(6, 1):
            test_prefill.prefill(launcher, shape_of(stored, window), sequences, query_scale)

    return check


def growing_units() -> None:
    test_prefill.test_the_unit_grows_from_tile_to_tile("any", "int8")


def write(stored: str) -> Check:
    return partial(test_kernels.test_rope_write_kv_quantises, "any", "float32", stored, 8)


def widen(dtype: str, stored: str) -> Check:
    test = test_kernels.test_tensor_cores_widen_every_element_exactly
    return partial(test, "any", dtype, stored, 1)


def heads(num_queries: int) -> Check:
    test = test_bfloat16_range.test_each_head_has_its_own_magnitude
    return partial(test, "any", "int8", num_queries, 40)


def large_element(num_queries: int) -> Check:
    test = test_bfloat16_range.test_an_element_is_far_larger_than_those_that_count
    return partial(test, "any", "int8", num_queries)


def large_value(num_queries: int) -> Check:
    test = test_bfloat16_range.test_a_value_is_far_larger_than_those_that_count
    return partial(test, "any", "int8", num_queries)


def many_tiles() -> None:
    shape = shape_of("auto")
    test_kernels.attend(
        "any", shape, [(1, 33 * TILE_TOKENS)], chip=Chip(num_multiprocessors=1, shared_bytes=0)
    )


log_probabilities = partial(test_sampling.test_log_probabilities, "any", "float32", 40)


class Mutant(NamedTuple):
    """A line of a file, what replaces it, and the check that must notice."""

    file: str
    old: str
    new: str
    check: Check


MUTANTS = {
    "a tile begins with its block": Mutant(
        "decode_mma.cuh", "(unsigned)token % (unsigned)step.block_size", "0u", streamed("auto")
    ),
    "tokens past the end are fetched": Mutant(
        "decode_mma.cuh",
        "(unsigned)(distance + j) < (unsigned)(end - begin)",
        "(unsigned)(distance + j) < (unsigned)(end - begin) + 16u",
        streamed("auto"),
    ),
    "only the first head's maximum is looked at": Mutant(
        "decode_mma.cuh",
        " || fmaxf(s[1], s[3]) > top[h][1]",
        "",
        streamed("auto", query_scale=60.0),
    ),
    "lanes keep their own maxima": Mutant(
        "decode_mma.cuh",
        "new_top = fmaxf(new_top, __shfl_xor_sync(MIE_FULL_WARP, new_top, offset));",
        ";",
        streamed("auto"),
    ),
    "the sum of weights keeps its old unit": Mutant(
        "decode_mma.cuh", "          sum[h][e] *= keep;\n", "", streamed("auto")
    ),
    "the output keeps its old unit": Mutant(
        "decode_mma.cuh",
        "for (int e = 0; e < 4; ++e) acc[h][k][e] *= keep;",
        "for (int e = 0; e < 2; ++e) acc[h][k][e] *= keep;",
        streamed("int8"),
    ),
    "weights stay in the first unit": Mutant(
        "decode_mma.cuh",
        "per_unit = inverse * WEIGHT_POWER;",
        "per_unit = per_unit > 0.0f ? per_unit : inverse * WEIGHT_POWER;",
        streamed("int8"),
    ),
    "the key's scale is that of a token before": Mutant(
        "decode_mma.cuh",
        "key_scale[r] = scales[g + 8 * r];",
        "key_scale[r] = scales[g];",
        streamed("int8"),
    ),
    "the scale of an unwritten value counts": Mutant(
        "decode_mma.cuh",
        "sees[r] ? scales[TOKENS + g + 8 * r] : 0.0f;",
        "scales[TOKENS + g + 8 * r];",
        streamed("int8"),
    ),
    "the ring is filled at another pace than it is used": Mutant(
        "decode_mma.cuh",
        "filled = filled == (STAGES - 1) * STAGE",
        "filled = filled == (STAGES - 2) * STAGE",
        streamed("auto"),
    ),
    "block ids are read once": Mutant(
        "decode_mma.cuh", "if (i % 32 == 0) {", "if (i == 0) {", many_tiles
    ),
    "values are widened in the order of keys": Mutant(
        "decode_mma.cuh",
        "four<0, 2, 1, 3>(wide[0], wide[1], low)",
        "four<0, 1, 2, 3>(wide[0], wide[1], low)",
        streamed("fp8"),
    ),
    "a half of the output is left in units": Mutant(
        "decode_mma.cuh",
        "acc[h][k][e + 2] * (unit / WEIGHT_POWER);",
        "acc[h][k][e + 2];",
        streamed("fp8"),
    ),
    "two elements of e4m3 are swapped": Mutant(
        "quantized.cuh",
        "I | J << 4 | K << 8 | L << 12",
        "I | J << 4 | L << 8 | K << 12",
        widen("bfloat16", "fp8"),
    ),
    "the second pair of int8 takes an element of the first": Mutant(
        "quantized.cuh",
        "second = fma_f16x2(spread<K, L>",
        "second = fma_f16x2(spread<I, L>",
        widen("float16", "int8"),
    ),
    "negative int8 are off by 256": Mutant(
        "quantized.cuh", "from ^ 0x80808080u", "from | 0x80808080u", widen("bfloat16", "int8")
    ),
    "the largest query becomes 1": Mutant(
        "quantized.cuh", "127 + 15 - (exponent - 127)", "127 - (exponent - 127)", large_element(1)
    ),
    "the weights of bfloat16 models are not raised": Mutant(
        "quantized.cuh", "? 0x1p15f : 1.0f", "? 1.0f : 1.0f", large_value(1)
    ),
    "a query's lanes have their own powers": Mutant(
        "decode_mma.cuh", "power_for_f16(warp_max<4>(largest))", "power_for_f16(largest)", heads(1)
    ),
    "heads take the power of the head before": Mutant(
        "decode_mma.cuh",
        "inverse_power(power), (2 * t + e) * 4",
        "inverse_power(power), 8 * t",
        heads(1),
    ),
    "the lanes of a prompt's row have their own powers": Mutant(
        "paged_prefill_mma.cu",
        "power_for_f16(warp_max<4>(largest))",
        "power_for_f16(largest)",
        heads(3),
    ),
    "a prompt's scores keep the power of their queries": Mutant(
        "paged_prefill_mma.cu", "score_scale[r] *= inverse_power(power);", ";", heads(3)
    ),
    "a prompt's weights are not raised": Mutant(
        "paged_prefill_mma.cu", "        per_unit[r] *= WEIGHT_POWER;\n", "", large_value(3)
    ),
    "large e4m3 have another exponent": Mutant(
        "quantized.cuh", "rounded - (120u << 3)", "rounded - (121u << 3)", write("fp8")
    ),
    "subnormal e4m3 begin too late": Mutant(
        "quantized.cuh", "size < 0x3c800000u ?", "size < 0x3c000000u ?", write("fp8")
    ),
    "halfway e4m3 are rounded up": Mutant(
        "quantized.cuh", "0x7ffffu + (size >> 20 & 1u)", "0x80000u", write("fp8")
    ),
    "tiny scales are kept": Mutant(
        "quantized.cuh", "scale < 0x1p-100f ? 0.0f : scale", "scale", write("int8")
    ),
    "values are rotated": Mutant(
        "rope_quantize_kv.cu",
        "const float c = is_value ? 1.0f : cosines[pair]",
        "const float c = cosines[pair]",
        write("int8"),
    ),
    "a window is a token too short": Mutant(
        "splits.cuh", "max(0, length - window)", "max(0, length - window + 1)", split("auto", 33)
    ),
    "the last split goes past the end": Mutant(
        "splits.cuh", "min(end, first + tokens)", "first + tokens", split("auto")
    ),
    "splits are merged without their maximum": Mutant(
        "attention.cuh",
        "exp2f(weights[r * count + i] - top)",
        "exp2f(weights[r * count + i])",
        split("auto", query_scale=60.0),
    ),
    "runs are merged without their maximum": Mutant(
        "attention.cuh",
        "exp2f(weights[r * count + i] - top)",
        "exp2f(weights[r * count + i])",
        streamed("auto", query_scale=60.0),
    ),
    "a run's part is looked for in the wrong place": Mutant(
        "paged_decode_stream.cu",
        "== head_begin ? 0 : 1);",
        "== head_begin ? 0 : 0);",
        streamed("auto"),
    ),
    "a window's first tile is left out": Mutant(
        "paged_decode_stream.cu",
        "max(0, length - window) / tile_tokens",
        "(max(0, length - window) + tile_tokens - 1) / tile_tokens",
        partial(decode, shape_of("auto", 33), is_deterministic=False),
    ),
    "a prompt's window is a token too long": Mutant(
        "paged_prefill_mma.cu", "- tile - i) < reach", "- tile - i) <= reach", prefill("auto", 20)
    ),
    "the diagonal's mask begins with the last row": Mutant(
        "paged_prefill_mma.cu",
        "tile + KEYS - 1 > warp_first",
        "tile + KEYS - 1 > warp_last",
        prefill("auto"),
    ),
    "a prompt's blocks are looked up once": Mutant(
        "paged_prefill_mma.cu", "      look_up(tile + KEYS);\n", "", prefill("auto")
    ),
    "a prompt's output keeps its old unit": Mutant(
        "paged_prefill_mma.cu", "        keep *= unit[r] * per_unit[r];\n", "", growing_units
    ),
    "a prompt's keys share the scales of eight": Mutant(
        "paged_prefill_mma.cu",
        "n / 2 * 32 + n % 2 * 8 + e",
        "n / 2 * 32 + e",
        prefill("int8"),
    ),
    "parts of a prompt are merged without their maximum": Mutant(
        "attention.cuh",
        "exp2f(weights[r * count + i] - top)",
        "exp2f(weights[r * count + i])",
        split_prefill("auto", query_scale=60.0),
    ),
    "a prompt's first split is left out": Mutant(
        "paged_prefill_mma.cu",
        "split * kept.num_tiles",
        "max(split, 1) * kept.num_tiles",
        split_prefill("auto"),
    ),
    "a prompt's splits are merged too early": Mutant(
        "paged_prefill_mma.cu",
        "is_last_to_arrive(count, kept.num_splits)",
        "is_last_to_arrive(count, kept.num_splits - 1)",
        split_prefill("auto"),
    ),
    "a prompt's splits go on to its end": Mutant(
        "paged_prefill_mma.cu",
        "oldest = split.begin, end = split.end;",
        "oldest = split.begin, end = seen_end;",
        split_prefill("auto"),
    ),
    "a prompt's splits begin inside a tile": Mutant(
        "paged_prefill_mma.cu", "split_of<KEYS>", "split_of<16>", split_prefill("auto", 70)
    ),
    "a prompt's window begins with its last row": Mutant(
        "paged_prefill_mma.cu",
        "max(0, offset + first_row / group + 1 - window)",
        "max(0, offset + last_row / group + 1 - window)",
        split_prefill("auto", 50),
    ),
    "a part's maximum lacks its scale": Mutant(
        "paged_prefill_mma.cu",
        "top[r] * score_scale[r] + log2f(sum[r])",
        "top[r] + log2f(sum[r])",
        split_prefill("auto"),
    ),
    "a row without a key in a split is divided by zero": Mutant(
        "paged_prefill_mma.cu",
        "is_empty ? 0.0f : (QUANTIZED",
        "(QUANTIZED",
        split_prefill("auto"),
    ),
    "a row without a key in a split has a weight": Mutant(
        "paged_prefill_mma.cu",
        "is_empty ? -MIE_INF : top",
        "is_empty ? 0.0f : top",
        split_prefill("auto"),
    ),
    "parts keep their unit": Mutant(
        "paged_prefill_mma.cu",
        "QUANTIZED ? unit[r] / WEIGHT_POWER",
        "QUANTIZED ? 1.0f / WEIGHT_POWER",
        split_prefill("int8"),
    ),
    "tiles of rows share a count": Mutant(
        "paged_prefill_mma.cu",
        "grid_row * kept.num_tiles + kept.row_tile",
        "grid_row * kept.num_tiles",
        split_prefill("auto"),
    ),
    "sequences share their parts": Mutant(
        "paged_prefill_mma.cu",
        "blockIdx.z * gridDim.y + blockIdx.y",
        "blockIdx.z * gridDim.y",
        split_prefill("auto"),
    ),
    "warps share the rows of a part": Mutant(
        "paged_prefill_mma.cu", "* ROWS + tile_row;", "* ROWS + g + 8 * r;", split_prefill("auto")
    ),
    "merged rows go to the first tile": Mutant(
        "paged_prefill_mma.cu",
        "[&](int r) { return result(kept.first_row + r); }",
        "[&](int r) { return result(r); }",
        split_prefill("auto"),
    ),
    "a plain prompt skips the tiles whose scores are NaN": Mutant(
        "paged_prefill.cu",
        " && !__any_sync(MIE_FULL_WARP, score != score)",
        "",
        partial(test_nonfinite.compare, "any", test_nonfinite.PLAIN, 3, is_deterministic=False),
    ),
    "a warp's sum lacks half of the lanes": Mutant(
        "sums.cuh", "int offset = 16;", "int offset = 8;", log_probabilities
    ),
    "a block's sum lacks the first warp": Mutant(
        "sums.cuh", "int warp = 0;", "int warp = 1;", log_probabilities
    ),
    "equal tokens count as more likely": Mutant(
        "top_logprobs.cu", "logprob(i) > logprob", "logprob(i) >= logprob", log_probabilities
    ),
}


@pytest.fixture
def folder(copied_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the kernels that the tests' launchers run."""
    launcher = EmulatedLauncher(order="reverse")
    for module in (test_kernels, test_sampling):
        monkeypatch.setattr(module, "launcher", lambda *_: launcher)
    return copied_kernels


def test_the_kernels_pass_unchanged(folder: Path):
    for mutant in MUTANTS.values():
        mutant.check()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_noticed(folder: Path, name: str):
    file, old, new, check = MUTANTS[name]
    plant(folder, file, old, new)
    with pytest.raises((AssertionError, KernelFault)):
        check()
