"""Break the products of few rows and the merge of decodes, and see that a test notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import test_few_rows
import test_kernels
from emulated import needs_compiler
from planted import plant
from test_kernels import Shape, attend

from mie.ops_gpu.attention import SPLIT_TOKENS
from mie.ops_gpu.host.emulator import EmulatedLauncher
from mie.ops_gpu.signature import KernelFault

pytestmark = [needs_compiler, pytest.mark.slow]

PRODUCTS = {
    "the last elements of a row are left out": (
        "few_rows.cuh",
        "if (k + i < depth) elements[i]",
        "if (k + i + 1 < depth) elements[i]",
    ),
    "a load reads past the end of a row": (
        "few_rows.cuh",
        "return k < depth ? *reinterpret_cast<const uint4*>(row + k) : make_uint4(0, 0, 0, 0);",
        "return *reinterpret_cast<const uint4*>(row + k);",
    ),
    "the outputs of a pair swap their second halves": (
        "few_rows.cuh",
        "{low.z, high.z, low.w, high.w}",
        "{high.z, low.z, high.w, low.w}",
    ),
    "the halves of a load meet the wrong elements of x": (
        "few_rows.cuh",
        "{{x.x, x.y}, {x.z, x.w}}",
        "{{x.x, x.z}, {x.y, x.w}}",
    ),
    "rows past the last are read": ("few_rows.cuh", "if (row < rows.count) {", "{"),
    "a row takes the scale of its neighbour": (
        "few_rows.cuh",
        "x = normalised<T>(x, norm, scales[row]);",
        "x = normalised<T>(x, norm, scales[row ^ 1]);",
    ),
    "the weights of the norm are added": (
        "few_rows.cuh",
        "to_float(elements[i]) * scale * to_float(weights[i])",
        "to_float(elements[i]) * scale + to_float(weights[i])",
    ),
    "the scales are used before they are known": (
        "few_rows.cuh",
        "norm_scales<T, VECTOR>(rows, eps, scales);\n    __syncthreads();",
        "norm_scales<T, VECTOR>(rows, eps, scales);",
    ),
    "eps is left out": ("few_rows.cuh", "rows.depth + eps)", "rows.depth)"),
    "the warps' sums are read too early": (
        "few_rows.cuh",
        "products.store(partial);\n  __syncthreads();",
        "products.store(partial);",
    ),
    "the last warp's sum is left out": (
        "few_rows.cuh",
        "slice < num_warps * SLICES; ++slice",
        "slice < num_warps * SLICES - 1; ++slice",
    ),
    "a warp repeats its neighbour's stretch": (
        "few_rows.cuh",
        "first += num_warps * STRETCH;",
        "first += (num_warps - 1) * STRETCH;",
    ),
    "the columns of a product are swapped": (
        "few_rows.cuh",
        "[tile * 8 + 2 * t + e % 2] = acc[tile][e]",
        "[tile * 8 + 2 * t + (e + 1) % 2] = acc[tile][e]",
    ),
    "the order of the sum depends on the number of rows": (
        "few_rows.cuh",
        "sum[e] += partial[slice][e][pair][row];",
        "sum[e] += partial[rows.count % 2 ? slice : num_warps * SLICES - 1 - slice][e][pair][row];",
    ),
    "a chunk of rows writes to the first one": (
        "few_rows.cu",
        "T* block_out = out + (size_t)blockIdx.x * FEW_ROWS * width;",
        "T* block_out = out;",
    ),
    "outputs past the width are written": (
        "few_rows.cu",
        "if (outputs[e] >= width) continue;",
        "",
    ),
    "the product is rounded before the residual is added": (
        "few_rows.cu",
        "from_float<T>(is_added ? sum + to_float(*to) : sum)",
        "from_float<T>(is_added ? to_float(from_float<T>(sum / 3)) * 3 + to_float(*to) : sum)",
    ),
    "gate and up change places": (
        "few_rows.cu",
        "from_float<T>(gate / (1.0f + expf(-gate)) * up)",
        "from_float<T>(up / (1.0f + expf(-up)) * gate)",
    ),
    "the bias of up is that of the gate": (
        "few_rows.cu",
        "bias_of(bias, dim + pair)",
        "bias_of(bias, pair)",
    ),
    "heads turn the other way": (
        "few_rows.cu",
        "y0 = __fmaf_rn(-x1, s, __fmul_rn(x0, c));",
        "y0 = __fmaf_rn(x1, s, __fmul_rn(x0, c));",
    ),
    "values are rotated": (
        "few_rows.cu",
        "if (head < num_heads + num_kv_heads) {",
        "{",
    ),
    "padding is written to the cache": ("few_rows.cu", "if (slot < 0) return;", ""),
    "tokens past the first block take its positions": (
        "few_rows.cu",
        "token = blockIdx.x * FEW_ROWS + row;",
        "token = row;",
    ),
}
MERGES = {
    "the first block to arrive merges": (
        "attention.cuh",
        "atomicAdd(arrived, 1) == count - 1",
        "atomicAdd(arrived, 1) == 0",
    ),
    "parts are not published before the count": (
        "attention.cuh",
        "__threadfence();\n  __syncthreads();\n  const bool is_last",
        "const bool is_last",
    ),
    "the count is not reset": ("attention.cuh", "atomicExch(arrived, 0);", ";"),
    "the last part is left out": (
        "attention.cuh",
        "for (int part = 0; part < count; ++part) {",
        "for (int part = 0; part < count - 1; ++part) {",
    ),
    "heads share the first one's weights": (
        "attention.cuh",
        "const float weight = weights[r * count + part];",
        "const float weight = weights[part];",
    ),
    "the weights are read too early": (
        "attention.cuh",
        "exp2f(weights[r * count + i] - top);\n  }\n  __syncthreads();",
        "exp2f(weights[r * count + i] - top);\n  }",
    ),
    "sequences share a count": ("splits.cuh", "arrived + pair, count", "arrived, count"),
    "parts of a stream are looked for in the wrong rows": (
        "paged_decode_stream.cu",
        "i == 0 ? first_slot : 2 * (first + i)",
        "2 * (first + i)",
    ),
    "a stream counts a block too few": (
        "paged_decode_stream.cu",
        "arrived + low * num_kv_heads + kv_head, last - first + 1)",
        "arrived + low * num_kv_heads + kv_head, last - first)",
    ),
}


@pytest.fixture
def folder(copied_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the kernels that the tests' launchers run."""
    launchers = {
        mode: EmulatedLauncher(check=mode == "checked", order="reverse")
        for mode in ("any", "forward", "checked")
    }
    for module in (test_few_rows, test_kernels):
        monkeypatch.setattr(module, "launcher_of", lambda mode: launchers[mode])
    return copied_kernels


def check_products() -> None:
    """Run tests of the products in float16 and float32."""
    for mode in ("checked", "any"):  # the first build reports a bug that writes anywhere
        test_few_rows.test_sums_of_integers_are_exact(mode, "float16", 1100, 33, 35)
        test_few_rows.test_sums_of_integers_are_exact(mode, "float16", 33, 40, 9)
        test_few_rows.test_normalised_rows_are_multiplied(mode, "float16", 96, 24, 3)
        test_few_rows.test_gates(mode, "float16", 520, 17, 13)
        test_few_rows.test_heads_are_rotated_and_written(mode, "float16", 24, 21)
    test_few_rows.test_normalised_rows_are_multiplied("any", "float32", 1100, 33, 3)
    test_few_rows.test_a_rows_bits_do_not_depend_on_the_other_rows("any", "float32", 33)
    test_few_rows.test_an_infinite_value_spoils_no_other("float32")
    small = test_few_rows.Norm(weight=np.ones(64, np.float32), eps=1.0)
    x, weight = np.ones((1, 64), np.float32), np.eye(64, dtype=np.float32)
    out = np.empty_like(x)
    test_few_rows.FewRows(test_few_rows.launcher_of("any")).linear(x, weight, out, norm=small)
    np.testing.assert_allclose(out, 0.5**0.5, rtol=1e-6)


def check_merges() -> None:
    """Run long decodes twice over the same counters, streamed and not."""
    shape = Shape(dtype="float16", head_dim=64, group=2, num_kv_heads=2, block_size=16)
    sequences = [(1, length) for length in (3 * SPLIT_TOKENS + 5, 3, 2 * SPLIT_TOKENS, 65)]
    for mode in ("checked", "any"):
        for is_deterministic in (False, True):
            attend(mode, shape, sequences, is_deterministic)
            attend_twice(mode, shape, is_deterministic)


def attend_twice(mode: str, shape: Shape, is_deterministic: bool) -> None:
    """Check that a second call of one backend gives the bits of the first."""
    backend = test_kernels.make_backend(mode, shape.dtype, is_deterministic)
    batch, num_blocks = test_kernels.make_batch([(1, 700), (1, 300)], shape.block_size)
    cache, _ = test_kernels.make_cache(shape, batch, num_blocks)
    q = test_kernels.normal(shape.dtype, 2, 4, 64)
    first, second = (backend.paged_attention(q, cache, 0, batch, None) for _ in range(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("check", [check_products, check_merges])
def test_the_kernels_pass_unchanged(folder: Path, check: Callable[[], None]):
    check()


@pytest.mark.parametrize("name", [*PRODUCTS, *MERGES])
def test_a_planted_bug_is_noticed(folder: Path, name: str):
    file, old, new = PRODUCTS.get(name) or MERGES[name]
    plant(folder, file, old, new)
    with np.errstate(all="ignore"), pytest.raises((AssertionError, KernelFault)):
        check_products() if name in PRODUCTS else check_merges()
