"""Test weights that are rounded to small forms while they load, and the settings for it."""

import json
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from model_files import greedy, scores
from test_quantised_checkpoint import AWQ, GPTQ, awq, write_quantised
from tiny_models import LLAMA, QWEN3_TIED, random_weights, write_model

from mie.config.engine import EngineConfig
from mie.errors import ConfigError, WeightsError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops.weights.quantised import SMALLEST_SCALE, Form, dequantise, quantise

INT8, INT4 = (Form(codes=codes, group=32, has_offsets=False) for codes in ("int8", "int4"))


def generated(directory: Path, **settings: Any) -> list[int]:
    return greedy(directory, 24, **settings)


# Rounding.


@given(
    npst.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 70)),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    ),
    st.sampled_from([INT8, INT4]),
)
def test_every_weight_moves_by_at_most_half_a_step(weights: np.ndarray, form: Form):
    rows = quantise(weights, form)
    error = np.abs(dequantise(rows).astype(np.float64) - weights)
    steps = np.abs(rows.scales).repeat(form.group, axis=1)[:, : weights.shape[1]]
    # int4 has no code 8, so a number of the other sign may move by a whole step.
    bound = 1.0 if form is INT4 else 0.5
    zeroed = 8 * SMALLEST_SCALE if form is INT4 else 1e-42
    assert (error <= steps * (bound + 1e-5) + zeroed).all()
    low, high = (-8, 7) if form is INT4 else (-127, 127)
    assert rows.codes.min() >= low
    assert rows.codes.max() <= high


def test_rounding_is_that_of_the_definition():
    weights = np.zeros((1, 40), np.float32)
    weights[0, :5] = 4.0, -2.0, 0.24, 0.26, -3.9
    weights[0, 32:34] = -1.0, 1.0  # a short group of its own
    rows = quantise(weights, INT4)
    assert rows.scales.tolist() == [[-0.5, 0.125]]
    assert rows.codes[0, :5].tolist() == [-8, 4, 0, -1, 7]
    assert rows.codes[0, 32:34].tolist() == [-8, 7]
    rows = quantise(weights, INT8)
    assert rows.scales[0].tolist() == [np.float32(each) / np.float32(127) for each in (4, 1)]
    assert rows.codes[0, :5].tolist() == [127, -64, 8, 8, -124]
    assert not quantise(np.zeros((2, 32), np.float32), INT4).codes.any()
    small = quantise(np.array([[2.0**-95], [2.0**-96]], np.float32), INT4)
    assert small.scales.tolist() == [[-(2.0**-98)], [0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, bad: float, quantization: str):
    weights = random_weights(LLAMA)
    weights["model.layers.1.mlp.up_proj.weight"][7, 3] = bad
    write_model(tmp_path, LLAMA, weights)
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.up_proj"):
        generated(tmp_path, quantization=quantization)


# Settings.


def test_tokens_are_those_of_the_rounded_weights_in_full_precision(tmp_path: Path):
    """The head and the embeddings are int8 by default, and tied ones are one matrix."""
    for name, config in (("llama", LLAMA), ("tied", QWEN3_TIED)):
        weights = random_weights(config)
        write_model(tmp_path / name, config, weights)
        for quantization, head_dtype, form, head in (
            ("int4", "auto", INT4, INT8),
            ("int8", "file", INT8, None),
            (None, "int4", None, INT4),
        ):
            rounded = {}
            for key, weight in weights.items():
                own = head if "embed" in key or "head" in key else form
                is_kept = own is None or weight.ndim == 1
                rounded[key] = weight if is_kept else dequantise(quantise(weight, own))
            wide = write_model(tmp_path / f"{name}-{quantization}", config, rounded)
            settings = {"quantization": quantization, "head_dtype": head_dtype}
            got = generated(tmp_path / name, **settings)
            assert got == generated(wide)


def test_dummy_weights_are_rounded_too(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    settings: dict[str, Any] = {"load_format": "dummy", "seed": 4}
    assert generated(tmp_path, **settings) != generated(tmp_path, **settings, quantization="int4")


def test_a_gguf_file_whose_norms_hold_one_is_rounded_like_its_directory(tmp_path: Path):
    model = Path(__file__).parents[2] / "golden/models/gemma_gelu"
    path = gguf_files.convert(model, tmp_path / "model.gguf")
    wanted = scores(model, backend="numpy", quantization="int8")
    assert scores(path, backend="numpy", quantization="int8") == wanted
    assert scores(path, backend="numpy") != wanted


@pytest.mark.parametrize(
    ("config", "names"), [(GPTQ, ["gptq", "gptq_marlin"]), (AWQ, ["awq", "awq_marlin"])]
)
def test_the_name_of_the_files_format_is_accepted(tmp_path, config, names):
    write_quantised(tmp_path, config, *([awq] if config is AWQ else []))
    wanted = generated(tmp_path)
    for name in names:
        assert generated(tmp_path, quantization=name) == wanted
    assert generated(tmp_path, head_dtype="int4") != wanted
    with pytest.raises(ConfigError, match=f"quantization is 'fp8'; the files are {names[0]}"):
        generated(tmp_path, quantization="fp8")
    with pytest.raises(ConfigError, match=r"q_proj\.weight is int4 in groups of 32.* already"):
        generated(tmp_path, quantization="int8")


def test_a_format_that_the_files_do_not_have_is_refused(tmp_path: Path):
    write_model(tmp_path, LLAMA, random_weights(LLAMA))
    with pytest.raises(
        ConfigError, match=r"is 'awq'; the files are not quantised .*'int8' or 'int4"
    ):
        generated(tmp_path, quantization="awq")
    with pytest.raises(ConfigError, match="head_dtype must be one of auto, file, int8, int4"):
        generated(tmp_path, head_dtype="fp8")


def test_the_plan_counts_forms(tmp_path: Path):
    config = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    write_model(tmp_path, config, random_weights(config))

    def weight_bytes(**settings: Any) -> int:
        small = EngineConfig(num_blocks=1, max_model_len=16)
        engine = load_engine(tmp_path, LoadSettings(engine=small, backend="numpy", **settings))
        return int(engine.metrics.sizes["mie:weights_bytes"])

    number = sum(weight.size for weight in random_weights(config).values() if weight.ndim == 2)
    vectors = 4 * 5 * 256
    assert weight_bytes() == 4 * number + vectors
    assert weight_bytes(quantization="int8") == number + number // 8 + vectors
    of_heads = 2 * 40 * 256
    of_layers = number - of_heads
    four = of_layers // 2 + of_layers // 8
    assert weight_bytes(quantization="int4") == four + of_heads + of_heads // 8 + vectors
    assert weight_bytes(quantization="int4", head_dtype="file") == four + 4 * of_heads + vectors


def test_a_model_that_is_too_large_may_be_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    write_model(tmp_path, config, random_weights(config))
    monkeypatch.setattr("mie.ops.numpy_backend.available_bytes", lambda: 1_700_000)
    settings: dict[str, Any] = {"max_model_len": 16, "max_num_batched_tokens": 16}
    with pytest.raises(ConfigError, match="quantization=int4 fits") as error:
        generated(tmp_path, **settings)
    assert "quantization=int8" not in str(error.value)
    generated(tmp_path, **settings, quantization="int4")


def test_a_tied_head_that_the_file_repeats_is_ignored_when_the_embedding_is_rounded(tmp_path: Path):
    weights = random_weights(QWEN3_TIED)
    write_model(tmp_path / "one", QWEN3_TIED, weights)
    copy = weights["model.embed_tokens.weight"].copy()
    write_model(tmp_path / "two", QWEN3_TIED, weights | {"lm_head.weight": copy})
    wanted = generated(tmp_path / "one", quantization="int4")
    assert generated(tmp_path / "two", quantization="int4") == wanted
    copy[3, 3] += 1
    write_model(tmp_path / "two", QWEN3_TIED, weights | {"lm_head.weight": copy})
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs"):
        generated(tmp_path / "two", quantization="int4")
