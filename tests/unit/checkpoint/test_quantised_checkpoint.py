"""Test checkpoints of GPTQ and AWQ against packers of their own, and refusals by name."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import LLAMA, random_weights, write_model

from mie.checkpoint.config import load_model_config, model_config_from_hf
from mie.checkpoint.layouts import layout_of
from mie.checkpoint.quantisation import scheme_of
from mie.checkpoint.weights import Checkpoint, check_tied_head, expected_tensors, non_finite_tensors
from mie.cli import main
from mie.errors import ModelError, UnsupportedModelError, WeightsError
from mie.model.layers.config import Quantisation, Scheme
from mie.ops.weights.quantised import dequantise

CONFIG = LLAMA | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 56}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        }
    },
}
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each nibble of an int32 holds, from the lowest up."""

Tensors = dict[str, NDArray[Any]]


def words(values: list[int], bits: int) -> int:
    """Return integers in one int32, the first lowest."""
    word = sum(value << (bits * place) for place, value in enumerate(values))
    return word - (1 << 32) if word >> 31 else word


def packed_down(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Pack [K, N] along K."""
    per = 32 // bits
    rows = [
        [words([int(x) for x in codes[i : i + per, j]], bits) for j in range(codes.shape[1])]
        for i in range(0, len(codes), per)
    ]
    return np.array(rows, np.int32)


def packed_across(
    codes: NDArray[Any], bits: int, order: tuple[int, ...] | None = None
) -> NDArray[np.int32]:
    """Pack [K, N] along N. Nibble i holds output order[i]."""
    per = 32 // bits
    order = order or tuple(range(per))
    rows = [
        [words([int(row[j + i]) for i in order], bits) for j in range(0, len(row), per)]
        for row in codes
    ]
    return np.array(rows, np.int32)


def gptq(weight: NDArray[Any], bits: int = 4, group: int = 32, minus: int = 1) -> Tensors:
    """Return the tensors of GPTQ, and the exact weights under "wanted"."""
    columns = weight.T  # [K, N]
    number = len(columns) // group
    largest = np.abs(columns.reshape(number, group, -1)).max(1)
    scales = (largest / (2 ** (bits - 1) - 1)).astype(np.float16)
    wide = scales.repeat(group, axis=0).astype(np.float32)
    zero = 2 ** (bits - 1)
    codes = np.clip(np.round(columns / wide) + zero, 0, 2 * zero - 1).astype(int)
    zeros = np.full((number, len(weight)), zero - minus)
    return {
        "qweight": packed_down(codes, bits),
        "qzeros": packed_across(zeros, bits),
        "scales": scales,
        "g_idx": (np.arange(len(columns)) // group).astype(np.int32),
        "wanted": ((codes - zero) * wide).T.astype(np.float32),
    }


def awq(weight: NDArray[Any], group: int = 32) -> Tensors:
    """Return the tensors of AWQ, and the exact weights under "wanted"."""
    columns = weight.T
    groups = columns.reshape(-1, group, columns.shape[1])
    low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.clip(np.round(-low / scales.astype(np.float32)), 0, 15).astype(int)
    wide, wide_zeros = (x.repeat(group, axis=0) for x in (scales.astype(np.float32), zeros))
    codes = np.clip(np.round(columns / wide) + wide_zeros, 0, 15).astype(int)
    return {
        "qweight": packed_across(codes, 4, AWQ_NIBBLES),
        "qzeros": packed_across(zeros, 4, AWQ_NIBBLES),
        "scales": scales,
        "wanted": ((codes - wide_zeros) * wide).T.astype(np.float32),
    }


def write_quantised(
    directory: Path,
    quantisation: dict[str, Any],
    pack: Callable[[NDArray[Any]], Tensors] = gptq,
    **changes: Any,
) -> Tensors:
    """Write a model whose linears are packed, and return the exact weights of all tensors.

    ``changes`` replace tensors by name. None drops one.
    """
    tensors, wanted = {}, {}
    for name, weight in random_weights(CONFIG).items():
        if any(linear in name for linear in LINEARS):
            parts = pack(weight)
            wanted[name] = parts.pop("wanted")
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{end}": tensor for end, tensor in parts.items()}
        else:
            tensors[name] = wanted[name] = weight
    for name, change in changes.items():
        tensors[name] = change
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items() if x is not None}
    write_model(directory, CONFIG | {"quantization_config": quantisation}, tensors)
    return wanted


def opened(directory: Path) -> Checkpoint:
    model = load_model_config(directory)
    return Checkpoint.open(directory, expected_tensors(model), model.quantisation)


def read_all(directory: Path) -> Tensors:
    with opened(directory) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint}


@pytest.mark.parametrize(
    ("config", "pack"),
    [
        (GPTQ, gptq),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, minus=0)),
        (GPTQ | {"bits": 8, "group_size": 16}, lambda weight: gptq(weight, bits=8, group=16)),
        (GPTQ | {"group_size": -1}, lambda weight: gptq(weight, group=weight.shape[1])),
        (AWQ, awq),
        (AWQ | {"version": "GEMM", "group_size": 16}, lambda weight: awq(weight, group=16)),
    ],
    ids=["gptq", "gptq-v2", "gptq-8", "gptq-row", "awq", "awq-16"],
)
def test_weights_are_exact(tmp_path: Path, config: dict[str, Any], pack: Any):
    wanted = write_quantised(tmp_path, config, pack)
    got = read_all(tmp_path)
    assert got.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert (got[name] == weight).all(), name
    with opened(tmp_path) as checkpoint:
        assert len(checkpoint.forms) == 14
        assert {each.codes for each in checkpoint.forms.values()} == {f"int{config['bits']}"}
        assert {each.has_offsets for each in checkpoint.forms.values()} == {
            pack is awq or "awq" in config["quant_method"]
        }
        assert checkpoint.matrix_dtypes == {"float32"}
        assert checkpoint.nbytes == sum(
            path.stat().st_size for path in tmp_path.glob("*.safetensors")
        ) - header_bytes(tmp_path / "model.safetensors")


@pytest.mark.parametrize(("config", "pack"), [(GPTQ, gptq), (AWQ, awq)], ids=["gptq", "awq"])
def test_blocks_of_outputs_are_the_matrix_in_pieces(tmp_path, monkeypatch, config, pack):
    monkeypatch.setattr("mie.checkpoint.quantised._TURNED_BYTES", 1)
    wanted = write_quantised(tmp_path, config, pack)
    with opened(tmp_path) as checkpoint:
        for name in checkpoint.forms:
            blocks = [dequantise(block) for block in checkpoint.blocks(name, 1)]
            assert {len(block) for block in blocks} == {8}
            assert (np.concatenate(blocks) == wanted[name]).all()


def test_one_scale_of_a_long_row_is_that_of_all_its_groups():
    scheme = Scheme(format="int-quantized", bits=8, group=None, symmetric=False)
    layout = layout_of((8, 300), scheme, "F16")
    rng = np.random.default_rng(0)
    tensors = {
        "weight": rng.integers(-128, 128, (8, 300)).astype(np.int8),
        "weight_scale": rng.normal(size=(8, 1)).astype(np.float16),
        "weight_zero_point": rng.integers(-128, 128, (8, 1)).astype(np.int8),
    }
    rows = layout.rows(tensors.__getitem__, 0, 8)
    assert rows.scales.shape == (8, 3)
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    wanted = (wide["weight"] - wide["weight_zero_point"]) * wide["weight_scale"]
    assert (dequantise(rows) == wanted).all()


@pytest.mark.parametrize("stated", [(64, 32), (32, 64), (-1, 64)])
def test_a_stated_shape_that_does_not_fit_is_refused(stated: tuple[int, int]):
    scheme = Scheme(format="pack-quantized", bits=4, group=32, symmetric=True)
    shape = {"weight_shape": np.array(stated)}
    problem = layout_of((64, 64), scheme, "F16").problem(shape.__getitem__)
    assert isinstance(problem, WeightsError)
    assert f"weight_shape is {stated}; config.json asks for (64, 64)" in str(problem)


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_matrix_that_the_file_left_as_it_is_may_be_beside_packed_ones(tmp_path: Path):
    name = "model.layers.0.self_attn.k_proj"
    weight = np.ones((32, 64), np.float32)
    parts = {f"{name}.{end}": None for end in ("qweight", "qzeros", "scales", "g_idx")}
    write_quantised(tmp_path, GPTQ, **parts, **{f"{name}.weight": weight})
    assert (read_all(tmp_path)[f"{name}.weight"] == weight).all()
    with opened(tmp_path) as checkpoint:
        assert f"{name}.weight" not in checkpoint.forms


def test_a_tied_head_of_a_quantised_model_is_compared(tmp_path: Path):
    write_quantised(tmp_path, GPTQ)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with opened(tmp_path) as checkpoint, pytest.raises(WeightsError, match="differs"):
        check_tied_head(checkpoint)


# Refused.


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedModelError) as error:
        model_config_from_hf(LLAMA | {"quantization_config": config})
    return str(error.value)


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "hqq", "fbgemm_fp8", "x" * 999])
def test_other_methods_are_refused_with_a_way_out(method: str):
    message = refused({"quant_method": method, "load_in_4bit": True})
    assert method[:12] in message
    assert "supported: compressed-tensors, gptq, awq" in message
    assert "quantization='int4'" in message
    assert len(message) < 500


@pytest.mark.parametrize("own", [{}, {"mode": "mxfp4"}, {"model.layers.0.mlp": {"bits": 8}}])
@pytest.mark.parametrize("is_twice", [True, False])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_quantised_model_of_mlx_is_refused_by_name(
    own: dict[str, Any], is_twice: bool, is_wrapped: bool
):
    scheme = {"group_size": 64, "bits": 4, **own}
    config = {"quantization": scheme, **({"quantization_config": scheme} if is_twice else {})}
    if is_wrapped:
        text = {**LLAMA, "model_type": "gemma3_text"}
        config |= {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    else:
        config = LLAMA | config
    with pytest.raises(UnsupportedModelError, match=r"MLX's quantisation .*the unquantised model"):
        model_config_from_hf(config)


def changed_group(**changes: Any) -> dict[str, Any]:
    [group] = PACKED["config_groups"].values()
    return PACKED | {"config_groups": {"a": group | {"weights": group["weights"] | changes}}}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GPTQ | {"sym": False}, "sym false"),
        (GPTQ | {"bits": 3}, "3 bits"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic"),
        (GPTQ | {"is_marlin_format": True}, "Marlin"),
        (GPTQ | {"checkpoint_format": "bitblas"}, "'bitblas'"),
        (GPTQ | {"group_size": 24}, "group_size 24"),
        (GPTQ | {"group_size": 0}, "group_size 0"),
        (AWQ | {"version": "gemv"}, "'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point false"),
        (AWQ | {"bits": 8}, "8 bits"),
        (PACKED | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        (PACKED | {"format": "marlin-24"}, "'marlin-24'"),
        (PACKED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (PACKED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (changed_group(num_bits=3), "int of 3 bits"),
        (changed_group(type="float"), "float of 4 bits"),
        (changed_group(actorder="group"), "actorder 'group'"),
        (changed_group(strategy="block"), "'block'"),
        (PACKED | {"format": "float-quantized"}, "float-quantized with int of 4 bits"),
    ],
)
def test_a_feature_of_a_format_is_refused_by_name(config: dict[str, Any], named: str):
    message = refused(config)
    assert named in message
    assert "config.json" in message
    assert "not supported" in message


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"bits": 4}, "quant_method"),
        ({"quant_method": 5}, "quant_method"),
        ([1], "quantization_config"),
        (GPTQ | {"bits": "4"}, "bits"),
        (GPTQ | {"bits": 10**400}, "bits"),
        (PACKED | {"config_groups": {}}, "config_groups"),
        (PACKED | {"config_groups": {"a": 1}}, "must be an object"),
        (PACKED | {"ignore": ["re:(a*)*b"]}, "none of a group"),
        (PACKED | {"ignore": ["re:(a|a)+b"]}, "none of a group"),
        (PACKED | {"ignore": ["re:.*.*.*x"]}, "repetitions"),
        (PACKED | {"ignore": ["re:x"] * 9}, "at most 8 patterns"),
        (PACKED | {"config_groups": {str(x): {} for x in range(9)}}, "must have at most 8"),
        (PACKED | {"ignore": ["re:" + "x" * 999]}, "characters"),
        (PACKED | {"ignore": ["re:("]}, "bad pattern"),
        (PACKED | {"ignore": ["x"] * 5000}, "at most 1024"),
    ],
)
def test_a_bad_value_is_refused_with_its_key(config: Any, named: str):
    with pytest.raises(ModelError, match=r"config\.json") as error:
        model_config_from_hf(LLAMA | {"quantization_config": config})
    assert named in str(error.value)
    assert len(str(error.value)) < 400


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({f"{Q}.qzeros": None}, f"'{Q}.qzeros' is missing"),
        ({f"{Q}.scales": None}, "scales"),
        ({f"{Q}.qweight": None}, f"'{Q}.weight'"),
        ({f"{Q}.extra": np.zeros(3)}, f"'{Q}.extra'"),
        ({f"{Q}.qweight": np.zeros((8, 32), np.int32)}, "has shape [8, 32]"),
        ({f"{Q}.qweight": np.zeros((8, 64), np.int64)}, "has dtype I64"),
        ({f"{Q}.scales": np.zeros((1, 64), np.float16)}, "has shape [1, 64]"),
        ({"model.norm.weight": np.zeros(64, np.int8)}, "has dtype I8; supported: F32, F16, BF16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_data_is_read(tmp_path, changes, named):
    write_quantised(tmp_path, GPTQ, **changes)
    with pytest.raises(WeightsError) as error:
        opened(tmp_path)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({f"{Q}.g_idx": (np.arange(64) % 2).astype(np.int32)}, "desc_act"),
        ({f"{Q}.qzeros": np.full((2, 8), 0x77777778, np.int32)}, "other zero points than 7"),
    ],
)
def test_values_that_are_not_supported_are_refused_with_the_matrix(tmp_path, changes, named):
    write_quantised(tmp_path, GPTQ, **changes)
    with pytest.raises(UnsupportedModelError) as error:
        read_all(tmp_path)
    assert named in str(error.value)
    assert f"{Q}.weight" in str(error.value)


@pytest.mark.parametrize("scale", [np.nan, np.inf, 1e38])
def test_scales_whose_weights_are_not_finite_are_refused(tmp_path: Path, scale: float):
    scales = np.ones((2, 64), np.float32)
    scales[1, 63] = scale
    write_quantised(tmp_path, GPTQ, **{f"{Q}.scales": scales})
    with opened(tmp_path) as checkpoint:
        assert f"{Q}.weight" in non_finite_tensors(checkpoint)
        [block] = checkpoint.blocks(f"{Q}.weight")
        with pytest.raises(WeightsError, match="NaN or infinite"):
            checkpoint.check_values(f"{Q}.weight", block)


@pytest.mark.parametrize(("scale", "is_tiny"), [(2.0**-98, False), (-(2.0**-99), True)])
def test_scales_that_are_too_small_are_refused(tmp_path: Path, scale: float, is_tiny: bool):
    scales = np.zeros((2, 64), np.float32)
    scales[1, 63] = scale
    write_quantised(tmp_path, GPTQ, **{f"{Q}.scales": scales})
    with opened(tmp_path) as checkpoint:
        [block] = checkpoint.blocks(f"{Q}.weight")
        refused = pytest.raises(WeightsError, match="too small for codes of 4 bits")
        with refused if is_tiny else nullcontext():
            checkpoint.check_values(f"{Q}.weight", block)
    with_offsets = replace(block, form=replace(block.form, has_offsets=True))
    assert with_offsets.has_tiny_scale == is_tiny


# Which modules are quantised.


def test_patterns_of_published_models_are_accepted():
    patterns = ["lm_head", r"re:.*layers\.[0-9]+\.mlp.*", "re:.*self_attn.*_proj$", "re:^mtp.*"]
    model = model_config_from_hf(LLAMA | {"quantization_config": PACKED | {"ignore": patterns}})
    assert model.quantisation is not None
    assert scheme_of(model.quantisation, "model.layers.3.mlp.up_proj") is None
    assert scheme_of(model.quantisation, "model.layers.3.other") is not None


def test_targets_are_names_classes_and_patterns():
    first, second = (
        Scheme(format="pack-quantized", bits=bits, group=32, symmetric=True) for bits in (4, 8)
    )
    rules = Quantisation(
        method="compressed-tensors",
        groups=(((r"re:.*down_proj$", "model.layers.0.mlp.up_proj"), second), (("Linear",), first)),
        ignore=("lm_head", "re:model.layers.1"),
    )
    assert scheme_of(rules, "model.layers.0.mlp.down_proj") is second
    assert scheme_of(rules, "model.layers.0.mlp.up_proj") is second
    assert scheme_of(rules, "model.layers.0.mlp.up_proj_2") is first
    assert scheme_of(rules, "model.layers.10.mlp.down_proj") is None  # a pattern is a beginning
    assert scheme_of(rules, "lm_head") is None
    assert scheme_of(rules, "x.lm_head") is first
    assert scheme_of(rules, "x.model.layers.1.mlp.down_proj") is second
    assert scheme_of(rules, "model.embed_tokens") is None  # no Linear


def test_inspect_prints_which_matrices_became_what(tmp_path, capsys):
    write_quantised(tmp_path, AWQ, awq)
    assert main(["inspect", str(tmp_path), "--check"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["quantised"] == (
        "int4 in groups of 32 with offsets: 2 q_proj, 2 k_proj, 2 v_proj, 2 o_proj, 2 gate_proj, "
        "2 up_proj, 2 down_proj"
    )
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["forms"]["model.layers.1.mlp.up_proj.weight"] == (
        "int4 in groups of 32 with offsets"
    )
    weights = random_weights(CONFIG)
    others = sum(4 * weight.size for name, weight in weights.items() if name not in report["forms"])
    small = sum(weights[name].size for name in report["forms"])
    assert report["weights_bytes_loaded"] == others + small // 2 + small // 32 * 8
