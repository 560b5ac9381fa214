"""List the kernels that `scripts/nvrtc_check.py` compiles, at the sizes that matter.

Add a line for a new kernel (a test finds those without), then run `scripts/nvrtc_check.py
--update`.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

from mie.ops_gpu.source import KERNELS

ROOT = Path(__file__).resolve().parents[2]
FLOATS = ("float", "f16", "bf16")
HALVES = ("f16", "bf16")
PRODUCTS = ("linear", "gated", "qkv")
EXPERTS = ("linear", "gated")
DEFAULT_WAYS = ("nibbles, 32, false, 32", "nibbles, 32, true, 8", "int8, 32, false, 32")
GGUF_WAYS = ("nibbles, 32, false, 16", "sextets, 16, false, 8")
"""Codes, inputs with a scale, offsets and bits of scales: int4, Q4_K, int8, Q4_0 and Q6_K."""
INTEGER_WAYS = (
    *("nibbles, 16, true, 8", "int8, 16, true, 32"),
    *("sextets, 16, false, 8", "nibbles, 32, true, 8"),
)
"""Codes, inputs with a scale, offsets and bits of scales: most registers, and most common."""
TENSOR_CORE_SIZES = ("64, 1, 4, 4", "64, 2, 4, 4", "128, 1, 4, 3", "128, 2, 4, 3")
OTHER_SIZES = ("80, 1, 4, 4", "80, 2, 4, 4", "96, 1, 4, 3", "112, 2, 4, 3", "256, 1, 4, 2")
QUANTIZED = ("int8", "e4m3")
INT4 = "int4x8"
QUANTIZED_OTHER_SIZES = ("80, 2, 4, 8, int8", "112, 2, 4, 6, e4m3", "256, 1, 4, 4, e4m3")
QUANTIZED_SIZES = ("64, 1, 4, 8", "64, 2, 4, 8", "128, 1, 4, 6", "128, 2, 4, 6")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Kernels of one file that are compiled together. ``threads`` is their largest block."""

    file: str
    names: tuple[str, ...]
    threads: int = 256
    options: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The file. Kernels of the package have short names, others a path in the repository."""
        return ROOT / self.file if "/" in self.file else KERNELS / self.file


def each(pattern: str, *choices: tuple[object, ...]) -> tuple[str, ...]:
    """Return ``pattern`` with every combination of the choices in its places."""
    return tuple(pattern.format(*values) for values in itertools.product(*choices))


ENTRIES = (
    Entry(
        file="adapters.cu",
        names=(
            *each("shrink_rows<{}, {}>", FLOATS, (1, 8)),
            *each("expand_rows<{}, {}>", FLOATS, (1, 8)),
        ),
    ),
    Entry(file="add_bias.cu", names=each("add_bias<{}>", FLOATS)),
    Entry(
        file="copy_blocks.cu",
        names=each(
            "{}<{}>",
            ("copy_blocks", "gather_blocks", "scatter_blocks"),
            ("f16", "bf16", "int8", INT4),
        ),
    ),
    Entry(
        file="few_rows.cu",
        names=(
            *each(
                "few_rows_{0}<{1}, {1}, 64, false, 32, {2}, true, true>", PRODUCTS, HALVES, (1, 2)
            ),
            *each("few_rows_linear<{0}, {0}, 64, false, 32, {1}, false, true>", HALVES, (1, 2)),
            *each(
                "few_rows_{}<{}, nibbles, 64, false, 32, {}, true, true>", PRODUCTS, HALVES, (1, 4)
            ),
            *each("few_rows_linear<f16, nibbles, 64, false, 32, {}, false, true>", (1, 2, 4)),
            *each("few_rows_linear<f16, nibbles, {}, true, 32, {}, true, true>", (16, 32), (1, 4)),
            *each("few_rows_linear<{}, int8, 64, false, 32, 2, true, true>", HALVES),
            # What runs by default: int4, heads of 8 bits, Q4_K, Q4_0 and Q6_K.
            *each("few_rows_{}<{}, {}, 2, true, true>", PRODUCTS, HALVES, DEFAULT_WAYS),
            *each("few_rows_linear<{}, {}, 1, true, true>", HALVES, (*DEFAULT_WAYS, *GGUF_WAYS)),
            *each("few_rows_linear<bf16, {}, 2, true, true>", GGUF_WAYS),
            "few_rows_linear<bf16, e4m3, 64, false, 32, 2, true, true>",
            # The others are for odd sizes and for checks in float32. These stand for them.
            "few_rows_linear<float, float, 64, false, 32, 1, true, true>",
            "few_rows_linear<float, nibbles, 32, true, 32, 1, true, true>",
            "few_rows_linear<bf16, bf16, 64, false, 32, 2, true, false>",
        ),
    ),
    Entry(file="round_rows.cu", names=each("round_rows<{}>", FLOATS)),
    Entry(
        file="integer_products.cu",
        names=(
            *each("integer_few<f16, {}, {}>", INTEGER_WAYS, (1, 2)),
            *each("integer_many<f16, {}>", INTEGER_WAYS),
            *each("integer_experts<f16, {}, {}>", INTEGER_WAYS[-1:], ("true", "false")),
            # These stand for the other types of rows. Only epilogues differ.
            "integer_few<bf16, nibbles, 32, true, 8, 1>",
            "integer_many<float, int8, 32, false, 32>",
        ),
    ),
    Entry(  # with the changes of adapters
        file="few_rows.cu",
        names=(
            *each("few_rows_{0}<{1}, {1}, 64, false, 32, 1, true, true, true>", PRODUCTS, HALVES),
            *each("few_rows_{0}<bf16, bf16, 64, false, 32, 2, true, true, true>", PRODUCTS),
            *each("few_rows_{}<{}, nibbles, 32, false, 32, 1, true, true, true>", PRODUCTS, HALVES),
        ),
    ),
    Entry(
        file="causal_conv.cu",
        names=each("{}<{}, {}>", ("causal_conv", "keep_columns"), HALVES, (3, 4)),
    ),
    Entry(
        file="recurrence.cu",
        names=(
            *each("recurrence<{}, {}, {}>", HALVES, (32, 64), ("true", "false")),
            "recurrence<float, 32, true>",
        ),
        threads=128,
    ),
    Entry(
        file="expert_rows.cu",
        names=(
            *each("experts_{0}<{1}, {1}, 64, false, 32, {2}, true>", EXPERTS, HALVES, (1, 4)),
            *each("experts_{}<{}, nibbles, 64, false, 32, {}, true>", EXPERTS, HALVES, (1, 4)),
            *each("experts_{}<bf16, int8, 32, false, 32, {}, true>", EXPERTS, (1, 4)),
            # These stand for other groups, odd sizes, and checks in float32.
            "experts_gated<f16, nibbles, 32, true, 8, 4, true>",
            "experts_gated<bf16, e4m3, 64, false, 32, 4, true>",
            "experts_linear<bf16, bf16, 64, false, 32, 4, false>",
            "experts_gated<float, float, 64, false, 32, 1, true>",
        ),
    ),
    Entry(
        file="route.cu",
        names=(
            *each("{}<{}>", ("route_tokens", "add_experts"), FLOATS),
            "route_tokens<bf16, true>",
            "sort_rows",
        ),
    ),
    Entry(
        file="widen_weights.cu",
        names=(
            *each("{}<f16, nibbles, 64, false, 32>", ("widen_weights", "gather_weights")),
            *each("{}<bf16, sextets, 16, false, 8>", ("widen_weights", "gather_weights")),
        ),
    ),
    Entry(
        file="wide_rows.cu",
        names=(
            *each("wide_linear<{}, {}, {}, 6>", HALVES, DEFAULT_WAYS, (4, 8)),
            *each("wide_linear<bf16, {}, {}, 6>", GGUF_WAYS, (4, 8)),
            # These stand for other groups and codes.
            "wide_linear<f16, nibbles, 64, false, 32, 8, 6>",
            "wide_linear<f16, nibbles, 16, true, 32, 8, 6>",
            "wide_linear<bf16, e4m3, 64, false, 32, 8, 6>",
        ),
    ),
    Entry(file="gather_rows.cu", names=each("{}<{}>", ("gather_rows", "scale_rows"), FLOATS)),
    # The sizes where registers are scarcest, and the most common ones. All sizes would take a
    # minute more.
    Entry(
        file="paged_decode.cu",
        names=(
            *each("paged_decode<{}, {}, 4, 4>", HALVES, (64, 128)),
            *each("paged_decode<f16, {}, 4>", ("64, 1", "128, 8", "256, 4")),
            "paged_decode<float, 64, 4, 4>",
            *each("paged_decode<{}, {}>", ("f16", "float"), ("64, 4, 4, int8", "128, 8, 4, e4m3")),
            *each("paged_decode<{}, {}, 4, {}>", HALVES, ("64, 4", "128, 8"), (INT4,)),
            "paged_decode<float, 64, 4, 4, int4x8>",
            *each("paged_decode<{0}, 256, 2, 4, {0}, true>", HALVES),  # Gemma 2
        ),
        threads=128,
    ),
    Entry(
        file="paged_decode_stream.cu",
        names=(
            *each("paged_decode_stream<{}, {}>", HALVES, TENSOR_CORE_SIZES),
            *each("paged_decode_stream<{}, {}, {}>", HALVES, QUANTIZED_SIZES, QUANTIZED),
            *each("paged_decode_stream<{}, {}>", HALVES, OTHER_SIZES),
            *each("paged_decode_stream<bf16, {}>", QUANTIZED_OTHER_SIZES),
            "paged_decode_stream<bf16, 256, 1, 4, 2, bf16, true>",  # Gemma 2
            "paged_decode_stream<bf16, 128, 1, 4, 3, bf16, true>",
            "count_tiles",
        ),
        threads=128,
    ),
    Entry(
        file="paged_prefill.cu",
        names=(
            *each(
                "paged_prefill<{}>", ("f16, 64", "f16, 128", "bf16, 128", "f16, 256", "float, 64")
            ),
            *each("paged_prefill<{}>", ("f16, 64, int8", "f16, 256, e4m3", "float, 64, int8")),
            *each("paged_prefill<{}, {}, {}>", HALVES, (64, 128), (INT4,)),
            "paged_prefill<bf16, 256, bf16, true>",
        ),
        threads=128,
    ),
    Entry(
        file="paged_prefill_mma.cu",
        names=(
            *each("paged_prefill_mma<{}, {}, 1>", HALVES, (64, 80, 96, 112, 128, 256)),
            *each("paged_prefill_mma<{}, {}, 1, {}>", HALVES, (64, 128, 256), QUANTIZED),
            *each("paged_prefill_mma<bf16, {}, 1, {}>", (80, 96, 112), QUANTIZED),
            *each("paged_prefill_mma<bf16, {}, bf16, true>", ("256, 1", "128, 1", "128, 2")),
            *each("paged_prefill_mma<{}, {}, 2>", HALVES, (64, 80, 96, 128)),
        ),
        threads=128,
    ),
    Entry(
        file="rms_norm.cu", names=each("{}<{}>", ("rms_norm", "head_norm", "gated_norm"), FLOATS)
    ),
    Entry(
        file="rope_quantize_kv.cu",
        names=each("rope_quantize_kv<{}, {}>", FLOATS, (*QUANTIZED, INT4)),
    ),
    Entry(file="rope_write_kv.cu", names=each("rope_write_kv<{}>", FLOATS)),
    *(
        Entry(file=f"{name}.cu", names=each(f"{name}<{{}}>", FLOATS))
        for name in ("edit_logits", "find_largest", "weigh_tokens", "keep_candidates")
    ),
    Entry(file="choose_tokens.cu", names=each("choose_tokens<{}>", FLOATS), threads=512),
    Entry(file="top_logprobs.cu", names=each("top_logprobs<{}>", FLOATS), threads=512),
    Entry(
        file="rank_parts.cu",
        names=(*each("{}<{}>", ("copy_columns", "take_parts", "pick_rows"), FLOATS), "own_rows"),
    ),
    Entry(file="take_tokens.cu", names=("take_tokens",)),
    Entry(
        file="gated_mul.cu", names=each("{}<{}>", ("gated_mul", "sigmoid_mul", "soft_cap"), FLOATS)
    ),
    # Not a kernel of the package, but it uses every wrapper of mie_ptx.cuh.
    Entry(
        file="tests/kernels/emulator.cu",
        names=(
            *("warp_operations", "larger", "block_votes", "atomics", "matrices", "last_block_adds"),
            *("widened_by_bits", "integer_matrices", "ieee"),
            *each("{}<{}>", ("scaled", "packed", "gemm", "fused"), HALVES),
            *each("widened<{}>", QUANTIZED),
        ),
    ),
)

SPILLS = {
    "few_rows.cu few_rows_gated<f16, nibbles, 32, true, 8, 2, true, true>": 32,
    "few_rows.cu few_rows_qkv<f16, nibbles, 32, true, 8, 2, true, true>": 64,
    "few_rows.cu few_rows_linear<f16, nibbles, 16, true, 32, 4, true, true>": 72,
    "few_rows.cu few_rows_linear<f16, nibbles, 16, true, 32, 1, true, true>": 32,
    "few_rows.cu few_rows_linear<f16, nibbles, 32, true, 8, 2, true, true>": 32,
    "few_rows.cu few_rows_qkv<f16, int8, 32, false, 32, 2, true, true>": 68,
    "few_rows.cu few_rows_qkv<bf16, int8, 32, false, 32, 2, true, true>": 8,
    "paged_prefill_mma.cu paged_prefill_mma<bf16, 256, 1, bf16, true>": 8,
    "paged_prefill_mma.cu paged_prefill_mma<f16, 80, 2>": 16,
    "paged_prefill_mma.cu paged_prefill_mma<bf16, 80, 2>": 16,
    "paged_decode_stream.cu paged_decode_stream<f16, 64, 2, 4, 8, int8>": 8,
    "paged_decode_stream.cu paged_decode_stream<f16, 64, 2, 4, 8, e4m3>": 8,
    # Only chips with 228 KB of shared memory run these: of the targets, sm_90.
    "paged_prefill_mma.cu paged_prefill_mma<f16, 128, 2>": 64,
    "paged_prefill_mma.cu paged_prefill_mma<bf16, 128, 2>": 64,
    "paged_prefill_mma.cu paged_prefill_mma<bf16, 128, 2, bf16, true>": 80,
    "integer_products.cu integer_many<f16, nibbles, 32, true, 8>": 32,
    "wide_rows.cu wide_linear<f16, nibbles, 32, true, 8, 8, 6>": 48,
    "wide_rows.cu wide_linear<bf16, nibbles, 32, true, 8, 8, 6>": 64,
    "wide_rows.cu wide_linear<bf16, sextets, 16, false, 8, 8, 6>": 8,
    "wide_rows.cu wide_linear<f16, nibbles, 16, true, 32, 8, 6>": 148,
}
"""The most bytes of registers that kernels spill on some target. All others spill nothing.

Kernels of few rows spill on sm_120 and sm_90 only. With 9 to 16 rows a thread has 128 registers, so
that two blocks fit a multiprocessor, and with 32 rows 255.
`wide_linear` has up to 255, too, and spills on sm_120 only.
"""
