"""Test `mie.lab.diff`: its measurements, its records, and a fault in every operator."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import tiny_models
from compiled import needs_numba
from emulated import needs_compiler
from tables import quick_third
from tiny_models import TINY, TinyModel

import mie.lab.diff.compare
from mie.errors import ConfigError
from mie.lab.diff.compare import DiffWorkload, compare
from mie.lab.diff.recording import OPERATORS, RecordingBackend, Spot
from mie.lab.diff.report import DiffReport, Side
from mie.lab.diff.text import lines
from mie.lab.diff.tolerances import ALONE, QUANTIZED, TOLERANCES, Limits, errors_between
from mie.load.engine import load_engine
from mie.ops.backend import Backend, StepBatch
from mie.ops.numpy_backend import NumpyBackend
from mie.ops_gpu.ready import prompt

F64 = Side(backend="numpy", dtype="float64")
F32 = Side(backend="numpy", dtype="float32")
JIT = Side(backend="jit", dtype="float32")


def emulated(dtype: str) -> Side:
    return Side(backend="cupy-emulated", dtype=dtype)


def workload(model: TinyModel, /, **settings: Any) -> DiffWorkload:
    """Return two prompts with a common beginning, which cause chunks, a prefix hit, a copied block,
    and decodes."""
    prompts = [list(range(4, 22)), [*range(4, 14), *range(25, 35)]]
    work = DiffWorkload(
        directory=model.directory, model="tiny", prompts=prompts, max_tokens=6, block_size=4
    )
    return replace(work, **settings)


@contextmanager
def fault(operator: str, layer: int | None = None) -> Iterator[None]:
    """Make the largest element of each result of an operator of F32 wrong by 1 %.

    Without ``layer`` the results of all layers are wrong.
    """

    def spoil(spot: Spot, result: np.ndarray) -> np.ndarray | None:
        if spot.operator != operator or layer not in (None, spot.layer) or not result.size:
            return None
        result.flat[np.abs(result).argmax()] *= 1.01
        return result

    def loading(*args: Any, wrap: Callable[[Backend], Backend], **options: Any) -> Any:
        def spoiled(backend: Any) -> Backend:
            is_f32 = backend.dtype == np.float32
            return wrap(cast(Backend, RecordingBackend(backend, spoil)) if is_f32 else backend)

        return load_engine(*args, wrap=spoiled, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mie.lab.diff.compare, "load_engine", loading)
        yield


# Measuring.


@pytest.mark.parametrize(
    ("dtype", "x", "y", "ulp"),
    [
        ("float32", 1.0, 1.0, 0),
        ("float32", 1.0, 1.0 + 2**-23, 1),
        ("float32", 1.0, 1.0 - 2**-24, 1),
        ("float32", -1.0, -1.0 - 2**-23, 1),
        ("float32", 0.0, -0.0, 0),
        ("float32", 2.0**-149, -(2.0**-149), 2),
        ("float16", 1.0, 1.0 + 2**-10, 1),
        ("float16", 2048.0, 2056.0, 4),
        ("bfloat16", 1.0, 1.0 + 2**-7, 1),
        ("float64", 1.0, 1.0 + 2**-52, 1),
        ("float64", -np.finfo(np.float64).max, np.finfo(np.float64).max, 2 * (2047 * 2**52 - 1)),
    ],
)
def test_a_ulp_is_a_step_to_the_next_number(dtype: str, x: float, y: float, ulp: int):
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert errors_between(np.array([x], kind), np.array([y], kind), 1.0).max_ulp == ulp
    assert errors_between(np.array([y], kind), np.array([x], kind), 1.0).max_ulp == ulp


def test_the_relative_error_is_of_the_largest_magnitude_and_judged_row_by_row():
    a = np.array([[[1e-9], [-8.0]], [[4.0], [2.0]], [[0.5], [0.25]]])
    b = np.array([[[3e-9], [-8.0]], [[4.5], [2.25]], [[0.5], [0.375]]])
    errors = errors_between(a, b, 1 / 8)
    assert errors.max_abs == 0.5
    assert errors.max_rel == 0.5 / 8
    assert errors.row_rel == 0.125 / 0.5
    assert errors.worst == errors.first == (2, 1, 0), "1 / 8 itself is allowed"
    assert errors_between(a, b, 1 / 9).first == (1, 0, 0)
    assert errors_between(a, b, 1 / 4).first is None
    assert errors_between(a, b, 0).first == (0, 0, 0)


def test_differences_of_infinities_and_nans():
    inf, nan = math.inf, math.nan
    same = np.array([inf, -inf, nan, 1.0])
    assert errors_between(same, same, 0).max_rel == 0
    for x, y in [(1.0, nan), (nan, 1.0), (1.0, inf), (inf, -inf), (inf, nan)]:
        errors = errors_between(np.array([2.0, x]), np.array([2.0, y]), 1e9)
        assert errors.max_rel == errors.row_rel == inf
        assert errors.first == errors.worst == (1,)
        assert errors.max_ulp == 0
    only = errors_between(np.array([nan]), np.array([1.0]), 1)
    assert (only.max_rel, only.row_rel, only.first) == (inf, inf, (0,))


# Comparing.


@pytest.mark.parametrize("family", quick_third((family,) for family in TINY))
def test_float32_is_within_tolerance_of_float64(tiny: dict[str, TinyModel], family: str):
    report = compare(workload(tiny[family]), F64, F32)
    assert report.is_within
    assert report.first is None
    assert report.tokens == ()
    assert report.num_tokens == 12
    rounded = [row for row in report.rows if row.operator != "embed"]
    assert all(0 < row.max_rel <= row.row_rel < row.limit for row in rounded)
    assert all(row.max_ulp > 0 for row in rounded)
    assert all(row.num_calls == report.num_steps for row in report.rows)
    assert all(row.worst.relative == row.row_rel for row in report.rows)


def test_a_backend_is_equal_to_itself_over_chunks_a_hit_a_copy_and_decodes(tiny):
    report = compare(workload(tiny["llama"]), F32, F32)
    assert report.is_within
    assert {(row.max_abs, row.max_rel, row.max_ulp) for row in report.rows} == {(0, 0, 0)}
    assert report.num_prefill_steps > 2
    assert report.num_cached_tokens == 10
    assert report.num_copies == 1
    assert report.num_decode_steps > 0
    assert report.num_mixed_steps > 0


ROLES_OF = {
    "llama": [
        *("embed", "attention_norm", "qkv", "rope_write_kv", "paged_attention", "o", "mlp_norm"),
        *("gate_up", "silu_mul", "down", "take_rows", "final_norm", "head", "logits"),
    ],
    "qwen3_tied": ["q_norm", "k_norm"],
    "gemma2": ["attention_post_norm", "gelu_mul", "mlp_post_norm", "soft_cap"],
    "hunyuan": ["rotated_norm"],
    "qwen3_moe": ["route", "experts"],
}
GOLDEN = Path(__file__).parents[2] / "golden" / "models"
ROLES_OF_GOLDEN = {
    "qwen2_moe_shared": ["gated_mlp"],
    "qwen35_delta": ["gated_attention"],
    "qwen3_next_experts": ["gated_attention", "gated_mlp"],
    "lfm2_short_convs": ["short_conv", "o"],
    "olmo_hybrid": ["qkv", "conv_silu", "gated_delta", "gated_norm", "o", "down"],
    "granite4_mamba": ["conv_silu", "mamba", "gated_norm", "o"],
}
"""Roles that the tiny models lack, and roles that follow them."""


def test_every_operator_has_a_model_in_which_it_is_changed():
    all_roles = (*ROLES_OF.values(), *ROLES_OF_GOLDEN.values())
    assert {*OPERATORS} == {role for roles in all_roles for role in roles}


@pytest.mark.parametrize(
    ("family", "operator"),
    quick_third((family, operator) for family, roles in ROLES_OF.items() for operator in roles),
)
def test_a_fault_in_any_operator_is_found(tiny: dict[str, TinyModel], family: str, operator: str):
    with fault(operator):
        report = compare(workload(tiny[family]), F64, F32)
    assert not report.is_within
    assert report.first is not None
    assert report.first.operator == operator
    in_layers = report.rows[[row.operator for row in report.rows].index(operator)].layer == 0
    assert report.first.layer == (0 if in_layers else None)
    assert report.first.relative == pytest.approx(0.01, rel=0.01)
    assert report.first.b == pytest.approx(1.01 * report.first.a, rel=1e-3)
    # A chunk samples nothing, so the first rows of logits appear later.
    has_rows = operator in ("take_rows", "final_norm", "head", "soft_cap", "logits")
    assert report.first.step == (3 if has_rows else 1)


@pytest.mark.parametrize(
    ("name", "operator"),
    quick_third((name, operator) for name, roles in ROLES_OF_GOLDEN.items() for operator in roles),
)
def test_a_fault_in_a_recurrence_or_a_gate_is_found_in_its_layer(name: str, operator: str):
    prompts = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 12, 13]]
    work = DiffWorkload(directory=GOLDEN / name, model=name, prompts=prompts, max_tokens=2)
    layers = {row.layer for row in compare(work, F64, F64).rows if row.operator == operator}
    with fault(operator, max(layers)):
        report = compare(work, F64, F32)
    assert report.first is not None
    assert (report.first.operator, report.first.layer) == (operator, max(layers))
    assert report.first.relative == pytest.approx(0.01, rel=0.01)


# Operators alone.


def test_a_fault_in_an_isolated_operator_stays_there(tiny: dict[str, TinyModel]):
    with fault("o", 0):
        wrong = compare(workload(tiny["llama"]), F64, F32, isolate=True)
    assert wrong.isolated
    past = {(row.operator, row.layer) for row in wrong.rows if not row.is_within}
    assert past == {("o", 0)}
    right = compare(workload(tiny["llama"]), F64, F32, isolate=True)
    assert right.is_within
    built_up = compare(workload(tiny["llama"]), F64, F32)
    rows = {(row.operator, row.layer): row for row in built_up.rows}
    assert all(row.row_rel <= rows[row.operator, row.layer].row_rel for row in right.rows[-4:])
    assert rows["down", 1].row_rel > 2 * right.rows[-5].row_rel
    assert "Each operator alone" in "\n".join(lines(right))


# Settings of a side.


def test_a_quantised_cache_on_one_side_is_noticed_and_allowed(tiny: dict[str, TinyModel]):
    int8 = replace(F32, settings={"kv_cache_dtype": "int8"})
    report = compare(workload(tiny["llama"]), F32, int8)
    assert report.is_within
    row = next(row for row in report.rows if row.operator == "paged_attention")
    assert 1e-3 < row.row_rel < row.limit == QUANTIZED["int8"].gates
    assert str(report.b) == "numpy float32 kv_cache_dtype=int8"
    same = compare(workload(tiny["llama"]), int8, int8)
    assert {row.max_abs for row in same.rows} == {0}
    assert report.as_json()["b"]["settings"] == {"kv_cache_dtype": "int8"}


@pytest.mark.parametrize(
    ("both", "isolate"), [(False, False), (False, True), (True, False)], ids=str
)
def test_rounded_activations_are_refused_where_they_have_no_limits(
    both: bool, isolate: bool, tiny: dict[str, TinyModel]
):
    int8 = replace(JIT, settings={"activations": "int8"})
    with pytest.raises(ConfigError, match="only with isolate and on both sides"):
        compare(workload(tiny["llama"]), int8 if both else F32, int8, isolate=isolate)


# Tokens.


def sampling_wrongly(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[np.ndarray, int], int]
) -> None:
    """Replace greedy tokens in float32 by ``change(logits, token)``."""
    sample = NumpyBackend.sample

    def wrong(self: NumpyBackend, logits: np.ndarray, rows: Any) -> list[int]:
        tokens = sample(self, logits, rows)
        if self.dtype != np.float32 or rows[0].forced_id is not None:
            return tokens
        return [change(row, token) for row, token in zip(logits, tokens, strict=True)]

    monkeypatch.setattr(NumpyBackend, "sample", wrong)


def test_a_token_that_contradicts_the_logits_exceeds_the_tolerance(tiny, monkeypatch):
    sampling_wrongly(monkeypatch, lambda logits, token: int(logits.argsort()[-2]))
    report = compare(workload(tiny["llama"]), F64, F32)
    assert report.first is None, "the logits are right"
    assert not report.is_within
    assert len(report.tokens) == report.num_tokens == 12
    part = report.tokens[0]
    assert (part.prompt, part.token, part.step) == (0, 0, 3)
    assert not part.is_near_tie
    assert len(part.a) == len(part.b) == 5
    assert part.a[0].token_id == part.b[1].token_id
    assert part.a[0].logprob > part.b[0].logprob
    assert part.a[0].text == str(part.a[0].token_id)
    assert sum(math.exp(each.logprob) for each in part.a) < 1
    text = "\n".join(lines(report))
    assert "12 of 12 differ, 12 by more than a near-tie.\nThe first is token 0 of prompt 0" in text
    answers = {part.prompt: part.token for part in report.tokens}
    assert answers == {0: 5, 1: 5}


def test_a_near_tie_is_named_and_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    weights = tiny_models.random_weights(tiny_models.LLAMA)
    weights["lm_head.weight"][1::2] = weights["lm_head.weight"][::2]
    tiny_models.write_model(tmp_path, tiny_models.LLAMA, weights)
    work = DiffWorkload(directory=tmp_path, model="twins", prompts=[[5, 6, 7]], max_tokens=3)
    sampling_wrongly(monkeypatch, lambda logits, token: token ^ 1)
    report = compare(work, F64, F32)
    assert [part.is_near_tie for part in report.tokens] == [True] * 3
    assert report.is_within
    assert "3 of 3 differ, only by near-ties." in "\n".join(lines(report))


def test_b_is_forced_to_the_tokens_of_a(tiny: dict[str, TinyModel]):
    """A large fault changes B's choices, but every step computes A's tokens."""
    work = workload(tiny["llama"], token_text=lambda token_id: f"<{token_id}>\n")
    with fault("embed"):
        wrong = compare(work, F64, F32)
    assert wrong.first is not None
    embeds = [row for row in wrong.rows if row.operator == "embed"]
    assert embeds[0].max_rel == pytest.approx(0.01, rel=0.01), "the inputs of no step differ"


def test_the_coarser_dtype_and_the_coarser_cache_choose_the_limit():
    single, double, half = (np.dtype(name) for name in ("float32", "float64", "float16"))
    assert Limits().of(single, double, "silu_mul") == TOLERANCES["float32"].gates
    assert Limits().of(double, double, "qkv") == TOLERANCES["float64"].layers
    assert Limits(isolated=True).of(half, single, "down") == ALONE["float16"].layers
    one, both = (Limits(kv_cache_dtypes=(name, "int8")) for name in ("auto", "int8"))
    assert one.of(single, single, "qkv") == QUANTIZED["int8"].layers
    assert both.of(single, single, "qkv") == QUANTIZED["int8 on both sides"].layers
    assert both.of(half, single, "qkv") == TOLERANCES["float16"].layers, "the larger of the two"
    assert one.of(single, single, "embed") == TOLERANCES["float32"].embed
    for coarser in ("fp8", "int4"):
        mixed = Limits(kv_cache_dtypes=("int8", coarser))
        assert mixed.of(single, single, "head") == QUANTIZED[coarser].logits
    alone = Limits(kv_cache_dtypes=("auto", "int8"), isolated=True)
    assert alone.of(single, single, "paged_attention") == QUANTIZED["int8"].gates
    assert alone.of(single, single, "silu_mul") == ALONE["float32"].gates
    assert TOLERANCES["float32"].reason in one.reason(single, single)
    assert QUANTIZED["int8"].reason in one.reason(single, single)


# Reports.


@pytest.fixture(scope="module")
def faulty(tiny: dict[str, TinyModel]) -> DiffReport:
    work = workload(
        tiny["llama"], model="<b>&model</b>", token_text=lambda token_id: f"<{token_id}>\n" * 9
    )
    with pytest.MonkeyPatch.context() as patch, fault("down", 1):
        sampling_wrongly(patch, lambda logits, token: int(logits.argsort()[-2]))
        return compare(work, F64, F32)


def test_the_text_names_the_place_of_a_fault_in_short_lines(faulty: DiffReport):
    shown = [*lines(faulty, layers=True)]
    assert "Tolerance exceeded, first at" in shown
    assert any(line.startswith("  step 1, layer 1, down, element [") for line in shown)
    past = {tuple(line.split()[:2]) for line in shown if line.endswith("PAST")}
    assert ("down", "1") in past
    assert max(map(len, shown)) <= 80


def test_json_has_every_number_even_infinities(faulty: DiffReport):
    assert faulty.first is not None
    report = replace(faulty, first=replace(faulty.first, relative=math.inf, b=math.nan))
    loaded = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert loaded["is_within"] is False
    assert (loaded["first"]["relative"], loaded["first"]["b"]) == ("inf", "nan")
    assert loaded["rows"][0]["operator"] == "embed"
    assert len(loaded["tokens"][0]["a"]) == 5
    assert loaded.keys() == {"is_within", *asdict(report)}


# The GPU's kernels.


@needs_numba
@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"),
    [
        ("qwen3_tied", "auto"),
        ("llama", "int8"),
        ("llama", "int4"),
        *(
            pytest.param(family, stored, marks=pytest.mark.slow)
            for family in TINY
            for stored in ("auto", "int8", "fp8", "int4")
        ),
    ],
)
def test_the_compiled_backend_is_within_tolerance(tiny, family, kv_cache_dtype):
    settings = {"kv_cache_dtype": kv_cache_dtype}
    a, b = (replace(side, settings=settings) for side in (F32, JIT))
    report = compare(workload(tiny[family]), a, b)
    assert report.is_within
    assert report.tokens == ()
    assert compare(workload(tiny[family]), a, b, isolate=True).is_within


@needs_compiler
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float32"),
        ("mistral_window", "bfloat16"),
        *(
            pytest.param(family, dtype, marks=pytest.mark.slow)
            for family in ("llama", "mistral_window", "qwen3_tied")
            for dtype in ("float32", "float16", "bfloat16")
            if (family, dtype) not in (("llama", "float32"), ("mistral_window", "bfloat16"))
        ),
    ],
)
def test_the_emulated_kernels_are_within_tolerance(tiny, family, dtype):
    report = compare(workload(tiny[family]), F32, emulated(dtype))
    assert report.is_within, "\n".join(lines(report, layers=True))
    assert any(row.max_rel > 0 for row in report.rows)


@needs_compiler
def test_padded_and_captured_steps_are_compared(tiny: dict[str, TinyModel]):
    """Three decodes are padded to four, and steps of one size are captured."""
    work = workload(tiny["llama"], prompts=[[5, 6], [7, 8], [9, 10]], max_num_batched_tokens=16)
    report = compare(work, F32, emulated("float32"))
    assert report.is_within
    assert report.num_decode_steps >= 4
    alone = compare(work, F32, emulated("float32"), isolate=True)
    assert alone.is_within
    assert alone.rows[-3].row_rel < report.rows[-3].row_rel


def test_steps_that_make_a_device_ready_are_not_compared(tiny, monkeypatch):
    """Such a step runs before A's first step has a counterpart."""
    ran = []

    def prepare(self: Any, progress: Any, forward: Callable[[StepBatch], Any], size: Any) -> None:
        ran.append(forward(prompt(3, 3)))

    monkeypatch.setattr(NumpyBackend, "prepare", prepare)
    report = compare(workload(tiny["llama"]), F64, Side(backend="numpy", dtype="float32"))
    assert ran
    assert report.first is None
