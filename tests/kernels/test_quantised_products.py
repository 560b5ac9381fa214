"""Compare products with quantised matrices with NumPy in float64 on the dequantised weights.

test_kernels.py says which modes there are.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_models
from emulated import needs_compiler
from quantised_rows import in_blocks
from test_few_rows import Attention, garbage, norm_of, normed
from test_graphs import WIDE
from test_kernels import check, dtype, launcher_of, make_backend, mode, normal, wide

from mie import LLM, SamplingParams
from mie.ops import activation
from mie.ops.weights.quantised import Form, QuantisedRows, dequantise, quantise
from mie.ops_gpu.arrays import DTYPES
from mie.ops_gpu.chip import EMULATED_CHIP, Chip
from mie.ops_gpu.few_rows import FewRows
from mie.ops_gpu.products import Products
from mie.ops_gpu.weights import CupyLinear, QuantisedMatrix, load_parts, packed_bytes

__all__ = ["dtype", "mode"]
pytestmark = needs_compiler


def form(codes: Any, group: int, has_offsets: bool = False) -> Form:
    return Form(codes=codes, group=group, has_offsets=has_offsets)


FORMS = [
    form("int4", 128),
    form("int4", 32, True),
    form("int8", 16),
    form("float8_e4m3fn", 128),
    form("int8", 64, True),
    form("int4", 16),
    form("int4", 64, True),
    form("int8", 32),
    form("float8_e4m3fn", 32),
]


def rows_of(form: Form, num_rows: int, depth: int, seed: int = 0) -> QuantisedRows:
    """Return random rows with every code, and scales that differ from group to group."""
    rng = np.random.default_rng([seed, num_rows, depth])
    low, high = {"int4": (0, 16) if form.has_offsets else (-8, 8), "int8": (-128, 128)}.get(
        form.codes, (0, 1)
    )
    codes: Any = rng.integers(low, high, (num_rows, depth)).astype(np.int8)
    if form.codes == "float8_e4m3fn":
        codes = rng.normal(scale=40, size=(num_rows, depth)).astype(ml_dtypes.float8_e4m3fn)
    groups = -(-depth // form.group)
    # Powers of two with a few bits: products with codes are exact in float32.
    scales = (rng.integers(1, 9, (num_rows, groups)) * 2.0**-8).astype(np.float32)
    offsets = (rng.integers(-8, 9, (num_rows, groups)) * 2.0**-5).astype(np.float32)
    return QuantisedRows(
        form=form, codes=codes, scales=scales, offsets=offsets if form.has_offsets else None
    )


def matrix_of(rows: QuantisedRows) -> QuantisedMatrix:
    """Return the matrix, which arrives in blocks of a few rows."""
    parts = [(len(rows), rows.form)]
    [matrix] = load_parts(np, rows.shape, in_blocks(rows, 11), parts, np.dtype(np.float16))
    assert isinstance(matrix, QuantisedMatrix)
    num_bytes = sum(array.nbytes for array in matrix.arrays if array is not None)
    assert num_bytes == packed_bytes(rows.shape, rows.form)
    return matrix


def weights(rows: QuantisedRows) -> np.ndarray:
    return wide(dequantise(rows))


def products(mode: Any) -> FewRows:
    return FewRows(launcher_of(mode), EMULATED_CHIP)


CASES = [
    # form, depth, width, rows of x
    pytest.param(form, *sizes, id=f"{form}-{sizes}")
    for form, sizes in zip(
        [*FORMS, FORMS[1]],
        [
            (1150, 40, 3),
            (200, 33, 11),
            (136, 16, 1),
            (520, 64, 19),
            (64, 50, 8),
            (90, 17, 40),
            (1032, 24, 16),
            (33, 130, 2),
            (128, 31, 65),
            (1100, 200, 5),
        ],
        strict=True,
    )
]


@pytest.mark.parametrize(("form", "depth", "width", "num_rows"), CASES)
def test_products_with_quantised_matrices(
    mode: str, dtype: str, form: Form, depth: int, width: int, num_rows: int
):
    rows = rows_of(form, width, depth)
    matrix, x, by = matrix_of(rows), normal(dtype, num_rows, depth), norm_of(dtype, depth)
    bias = normal(dtype, width, seed=2)
    out = garbage(mode, dtype, num_rows, width)
    products(mode).linear(x, matrix, out, bias=bias, norm=by)
    check(out, normed(x, by) @ weights(rows).T + wide(bias), dtype)
    out = garbage(mode, dtype, num_rows, width)
    products(mode).linear(x, matrix, out)
    check(out, wide(x) @ weights(rows).T, dtype)


@pytest.mark.parametrize(("num_multiprocessors", "shared_bytes"), [(1, 0), (1, 228 << 10), (3, 0)])
def test_a_block_takes_several_slices_or_shares_them(
    mode: Any, num_multiprocessors: int, shared_bytes: int
):
    """One block takes all of K, or three share it, with its rows in the ring or kept."""
    rows, dense = rows_of(FORMS[1], 40, 1150), normal("float16", 40, 1152, seed=1)
    chip = Chip(num_multiprocessors=num_multiprocessors, shared_bytes=shared_bytes)
    some = FewRows(launcher_of(mode), chip)
    for matrix, weight in ((matrix_of(rows), weights(rows)), (dense, wide(dense))):
        x, by = normal("float16", 3, weight.shape[1]), norm_of("float16", weight.shape[1])
        out = garbage(mode, "float16", 3, 40)
        some.linear(x, matrix, out, norm=by)
        check(out, normed(x, by) @ weight.T, "float16")


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_code_is_widened_exactly(dtype: str, form: Form):
    """Each product with a unit vector is one weight."""
    rows = rows_of(form, 32, 70)
    if form.codes != "float8_e4m3fn":
        low = (
            0 if form.has_offsets and form.codes == "int4" else -8 if form.codes == "int4" else -128
        )
        count = 16 if form.codes == "int4" else 256
        rows.codes[...] = (np.arange(32 * 70).reshape(32, 70) * 7 % count + low).astype(np.int8)
    matrix, x = matrix_of(rows), np.eye(70, dtype=DTYPES[dtype])
    out = garbage("forward", dtype, 70, 32)
    products("forward").linear(x, matrix, out)
    wanted = dequantise(rows).astype(DTYPES[dtype])
    assert out.T.tobytes() == wanted.tobytes()
    backend = make_backend("forward", dtype)
    gathered = backend.embed(np.arange(31, -1, -1, dtype=np.int32), matrix)
    assert np.ascontiguousarray(gathered[::-1]).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_scales_keep_all_their_bits(form: Form):
    """Scales of 24 bits differ from their rounding to float16 by up to 2^-11 of their size."""
    rows, rng = rows_of(form, 32, 70), np.random.default_rng(11)
    rows.scales[...] = rng.uniform(0.1, 1, rows.scales.shape).astype(np.float32)
    if rows.offsets is not None:
        rows.offsets[...] = rng.uniform(-1, 1, rows.offsets.shape).astype(np.float32)
    matrix, x, backend = (
        matrix_of(rows),
        np.eye(70, dtype=np.float32),
        make_backend("forward", "float32"),
    )
    few = garbage("forward", "float32", 70, 32)
    products("forward").linear(x, matrix, few)
    widened = backend.linear(x, CupyLinear(parts=(matrix,)))
    gathered = backend.embed(np.arange(32, dtype=np.int32), matrix)
    for got in (few, widened, gathered.T):
        np.testing.assert_allclose(wide(got).T, weights(rows), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("form", "dim"), [(FORMS[0], 48), (FORMS[1], 16), (FORMS[2], 80)])
@pytest.mark.parametrize("num_rows", [2, 18])
def test_gates_of_quantised_matrices(mode: str, dtype: str, form: Form, dim: int, num_rows: int):
    rows, depth = rows_of(form, 2 * dim, 144), 144
    x, by = normal(dtype, num_rows, depth), norm_of(dtype, depth)
    out = garbage(mode, dtype, num_rows, dim)
    products(mode).gated(x, matrix_of(rows), out, norm=by)
    gate_up = normed(x, by) @ weights(rows).T
    check(out, activation.silu_mul(gate_up), dtype)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("form", "head_dim"), [(None, 24), (FORMS[0], 64), (FORMS[1], 96)])
@pytest.mark.parametrize("num_rows", [4, 13])
def test_heads_of_quantised_matrices(
    mode: str, dtype: str, form: Form | None, head_dim: int, num_rows: int, has_norms: bool
):
    attention = Attention(dtype, head_dim, num_rows, 130)
    if form is not None:
        rows = rows_of(form, 7 * head_dim, 130)
        attention.weight, attention.matrix = dequantise(rows), matrix_of(rows)
    if has_norms:
        attention.head_norms = [1 + normal(dtype, head_dim, seed=seed) / 4 for seed in (8, 9)]
    for got, wanted in zip(attention.compute(mode), attention.wanted(), strict=True):
        check(got, wanted, dtype)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[5], FORMS[4]], ids=str)
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype: str, form: Form):
    """The other rows are large, infinite or NaN, and there are as many as each kernel takes."""
    rows = rows_of(form, 40, 1100)
    matrix, by = matrix_of(rows), norm_of(dtype, 1100)
    x = normal(dtype, 40, 1100)
    x[1] *= 100
    x[2] = np.inf
    x[3, 0] = np.nan

    def linear(rows: np.ndarray) -> np.ndarray:
        out = np.ones((len(rows), 40), rows.dtype)
        products("forward").linear(rows, matrix, out, norm=by, is_added=True)
        return out

    alone = [linear(x[row : row + 1]).tobytes() for row in range(0, 40, 3)]
    for num_rows in (8, 9, 17, 40):
        together = [row.tobytes() for row in linear(x[:num_rows])]
        assert together[::3] == alone[: len(together[::3])]
    assert np.isnan(wide(linear(x[3:4]))).all()


@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[3], FORMS[5]], ids=str)
def test_prompts_are_multiplied_with_widened_weights(
    mode: str, dtype: str, form: Form, monkeypatch: pytest.MonkeyPatch
):
    """The matrix is widened in pieces of 16 rows, and a part of floats is beside it."""
    monkeypatch.setattr("mie.ops_gpu.products.WIDENED_BYTES", 1)
    rows, dense = rows_of(form, 40, 100), normal(dtype, 7, 100, seed=3)
    weight = CupyLinear(parts=(matrix_of(rows), dense), bias=normal(dtype, 47, seed=2))
    backend = make_backend(mode, dtype)
    matrix = np.concatenate([weights(rows).astype(DTYPES[dtype]), dense])
    for num_rows in (3, 40, 70):  # ours, ours for the first part, and cuBLAS for both
        x = normal(dtype, num_rows, 100)
        residual = normal(dtype, num_rows, 47, seed=4)
        wanted = wide(x) @ wide(matrix).T + wide(weight.bias)
        check(backend.linear(x, weight), wanted, dtype)
        check(backend.linear(x, weight, residual=residual.copy()), wanted + wide(residual), dtype)


def test_a_bfloat16_row_of_any_magnitude_is_multiplied():
    """Its numbers are brought into the range of float16."""
    rows = quantise(normal("float32", 16, 576), form("int8", 64))
    x = normal("bfloat16", 3, 576)
    x[2, -1] = 1000  # another warp than the first one measures it
    x[0] = (wide(x[0]) * 1e30).astype(x.dtype)
    x[1] = (wide(x[1]) * 1e-30).astype(x.dtype)
    out = garbage("forward", "bfloat16", 3, 16)
    products("forward").linear(x, matrix_of(rows), out)
    for got, wanted in zip(wide(out), wide(x) @ weights(rows).T, strict=True):
        check(got.astype(DTYPES["bfloat16"]), wanted, "bfloat16")


def test_each_product_uses_the_kernels_it_may():
    launcher = launcher_of("forward")
    some = Products(launcher, None, EMULATED_CHIP, None, is_deterministic=False)  # type: ignore[arg-type]
    matrix = CupyLinear(parts=(matrix_of(rows_of(FORMS[0], 48, 64)),))
    dense = CupyLinear(parts=(np.zeros((48, 64), np.float16),))
    few, many = np.zeros((16, 64), np.float16), np.zeros((17, 64), np.float16)
    assert (some.takes_norm(few, matrix), some.takes_norm(many, matrix)) == (True, False)
    assert some.takes_heads(few, matrix, 32)
    assert not some.takes_heads(few, matrix, 24)  # a tile would have elements of both halves
    both = CupyLinear(parts=(*matrix.parts, *dense.parts))
    assert not some.takes_heads(few, both, 32)


MODELS = (
    tiny_models.QWEN3_TIED,
    tiny_models.LLAMA,
    tiny_models.QWEN2 | WIDE,
    tiny_models.QWEN3_TIED | WIDE,
)


def compare_run(folder: Path, seed: int) -> str:
    """Run drawn requests on a drawn model as NumPy does, and return a description.

    Prompts come in chunks of few rows and of many. The pool is too small for some runs, which
    preempt sequences.
    """
    rng = np.random.default_rng([seed, 40])
    config = MODELS[seed % len(MODELS)] | {"max_position_embeddings": 256}
    model = tiny_models.write_model(folder, config, tiny_models.random_weights(config))
    budget = int(rng.choice([8, 17, 24, 90]))
    settings: dict[str, Any] = {
        "quantization": str(rng.choice(["int8", "int4"])),
        "head_dtype": str(rng.choice(["auto", "file", "int4"])),
        "block_size": int(rng.choice([4, 16])),
        "max_num_batched_tokens": budget,
        "max_num_seqs": int(rng.choice([1, 3, 8])),
        "enable_prefix_caching": bool(rng.random() < 0.5),
        "preemption_mode": str(rng.choice(["recompute", "swap"])),
    }
    if settings["preemption_mode"] == "swap":
        settings["swap_space"] = 1 << 20
    settings["max_num_seqs"] = min(settings["max_num_seqs"], budget)
    settings["num_blocks"] = 160 // settings["block_size"] + int(rng.integers(0, 12))
    batch_invariant = bool(rng.random() < 0.5)
    lengths = [int(rng.integers(1, 100)) for _ in range(int(rng.integers(1, 6)))]
    prompts = [{"prompt_token_ids": [5 + i * (seed + 1) % 30 for i in range(n)]} for n in lengths]
    greedy = SamplingParams(
        max_tokens=int(rng.integers(2, 14)),
        temperature=0,
        ignore_eos=True,
        n=int(rng.integers(1, 3)),
    )
    tokens = []
    for backend in ("cupy-emulated", "numpy"):
        llm = LLM(
            str(model),
            backend=backend,
            dtype="float32",
            batch_invariant=batch_invariant and backend == "cupy-emulated",
            skip_tokenizer_init=True,
            **settings,
        )
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        tokens.append([[each.token_ids for each in output.outputs] for output in outputs])
    described = f"{config['model_type']} {settings} {batch_invariant} {lengths}"
    assert tokens[0] == tokens[1], described
    return described


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))]
)
def test_a_quantised_model_gives_the_tokens_of_numpy(tmp_path: Path, seed: int):
    assert compare_run(tmp_path, seed)
