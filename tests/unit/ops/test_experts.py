"""Test routing, stacks of experts in files, and their settings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled import needs_numba
from model_files import GOLDEN, golden_config, golden_values, greedy, scores
from safetensors.numpy import load_file, save_file
from tiny_models import GPT_OSS, QWEN3_MOE, random_weights, write_model

from mie import LLM
from mie.checkpoint.config import model_config_from_hf
from mie.checkpoint.tensors import expected_tensors
from mie.errors import ModelError, WeightsError
from mie.load.opened import rounded_forms
from mie.ops.layers.experts import by_expert, experts, route, route_by_sigmoid


def test_the_largest_logits_are_chosen_and_of_equal_ones_the_lowest_number() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, 7.0, -2.0]])
    routed = route(logits, 3, True)
    assert routed[:, 0].tolist() == [[1, 2, 3], [0, 1, 2], [2, 0, 1]]
    np.testing.assert_allclose(routed[:, 1].sum(1), 1)
    np.testing.assert_allclose(routed[1, 1], 1 / 3)
    among_all = route(logits, 3, False)
    assert among_all[1, 1].tolist() == [0.25] * 3
    np.testing.assert_allclose(route(logits, 4, False), route(logits, 4, True))


def test_each_expert_computes_its_tokens_once_and_their_rows_come_back() -> None:
    x, calls = np.arange(8.0).reshape(4, 2), []
    chosen = np.array([[2, 0], [0, 1], [2, 1], [0, 2]])
    weights = np.array([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])

    def compute(expert: int, rows: Any) -> Any:
        calls.append((expert, rows[:, 0].tolist()))
        return rows * 10**expert

    y = experts(x, np.stack([chosen, weights], axis=1), compute, np.ones_like(x))
    assert calls == [(0, [0.0, 2.0, 6.0]), (1, [2.0, 4.0]), (2, [0.0, 4.0, 6.0])]
    factors = (weights * 10.0**chosen).sum(1)
    np.testing.assert_allclose(y, 1 + x * factors[:, None])
    assert [(e, pairs.tolist()) for e, pairs in by_expert(chosen)][1] == (1, [3, 5])


def test_which_layers_are_sparse() -> None:
    def sparse(**changes: Any) -> list[bool]:
        config = golden_config("qwen3_moe_dense_layer", num_hidden_layers=4, **changes)
        return [config.has_experts(layer) for layer in range(4)]

    assert sparse() == [False, True, True, True]
    assert sparse(mlp_only_layers=None) == [True] * 4
    assert sparse(mlp_only_layers=[], decoder_sparse_step=2) == [False, True, False, True]
    config = golden_config("granitemoe_shared")
    assert config.has_experts(0)
    assert config.has_mlp(0)
    assert not golden_config("granitemoe_shared", shared_intermediate_size=0).has_mlp(0)


def test_keys_with_two_spellings_and_keys_without_effect() -> None:
    config = golden_values("qwen3_moe_dense_layer")
    number = config.pop("num_local_experts")
    four = model_config_from_hf({**config, "num_experts": number})
    assert four == golden_config("qwen3_moe_dense_layer")
    assert not golden_config("lfm2_experts", use_expert_bias=False).experts.has_router_bias  # type: ignore[union-attr]
    assert golden_config("gpt_oss_sinks", swiglu_limit=None) == golden_config("gpt_oss_sinks")


@pytest.mark.parametrize("number", [3, 5])
def test_a_stack_of_another_number_of_experts_is_refused(tmp_path: Path, number: int) -> None:
    source = GOLDEN / "granitemoe_stacked"
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.output_linear.weight"
    tensors[name] = tensors[name][np.arange(number) % 4].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(WeightsError, match=r"output_linear\.\d\.weight"):
        LLM(str(tmp_path), skip_tokenizer_init=True, backend="numpy")


def test_sigmoids_choose_with_the_bias_and_weigh_without() -> None:
    logits = np.array([[0.0, 2.0, -2.0, -1000.0], [0.0, 0.0, 0.0, 0.0]])
    routed = route_by_sigmoid(logits, np.array([0.0, -1.0, 0.5, 0.0]), 2)
    assert routed[:, 0].tolist() == [[2, 0], [2, 0]]
    scores = 1 / (1 + np.exp([2.0, 0.0]))
    np.testing.assert_allclose(routed[0, 1], scores / (scores.sum() + 1e-6))


def test_stacks_of_joined_matrices_are_the_matrices_of_each_expert(tmp_path: Path) -> None:
    source = GOLDEN / "qwen35_experts"
    tensors = load_file(source / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        own = [
            [tensors.pop(f"{prefix}{expert}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for expert in range(5)
        ]
        joined = [np.concatenate([gate, up]) for gate, up, _ in own]
        tensors[prefix + "gate_up_proj"] = np.stack(joined)
        tensors[prefix + "down_proj"] = np.stack([down for _, _, down in own])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    assert greedy(source, 6) == greedy(tmp_path, 6)
    tensors[prefix + "gate_up_proj"] = tensors[prefix + "gate_up_proj"][:, :-2].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"experts\.0\.gate_proj\.weight"):
        LLM(str(tmp_path), skip_tokenizer_init=True, backend="numpy")


def test_routers_are_not_rounded() -> None:
    forms = rounded_forms(model_config_from_hf(QWEN3_MOE), "int4")
    assert not [name for name in forms if name.endswith("mlp.gate.weight")]
    assert len([name for name in forms if ".experts." in name]) == 2 * 5 * 3


def as_mxfp4(stack: Any) -> dict[str, Any]:
    """Return the blocks, the scales and the values of a stack [E, K, N] rounded to MXFP4.

    Blocks are [E, N, K / 32, 16] as in gpt-oss's files.
    """
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    turned = stack.swapaxes(1, 2)
    groups = turned.reshape(*turned.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    scaled = groups / 2.0 ** exponents[..., None]
    codes = np.abs(np.abs(scaled)[..., None] - levels).argmin(-1)
    values = np.sign(scaled) * levels[codes] * 2.0 ** exponents[..., None]
    codes += 8 * (scaled < 0)
    return {
        "_blocks": (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8),
        "_scales": (exponents + 127).astype(np.uint8),
        "": values.reshape(turned.shape).swapaxes(1, 2).astype(np.float32).copy(),
    }


@pytest.mark.parametrize("backend", ["numpy", pytest.param("jit", marks=needs_numba)])
def test_experts_in_mxfp4_are_those_of_the_values(tmp_path: Path, backend: str) -> None:
    config = GPT_OSS | {"hidden_size": 32}
    weights = random_weights(config)
    files: dict[str, dict[str, Any]] = {"packed": {}, "values": {}}
    for name, array in weights.items():
        if array.ndim == 3:
            packed = as_mxfp4(array)
            files["values"][name] = packed.pop("")
            files["packed"] |= {
                name + end: np.ascontiguousarray(own) for end, own in packed.items()
            }
        else:
            files["packed"][name] = files["values"][name] = array
    declared = config | {"quantization_config": {"quant_method": "mxfp4"}}
    write_model(tmp_path / "packed", declared, files["packed"])
    write_model(tmp_path / "values", config, files["values"])

    packed, values = (scores(tmp_path / name, backend=backend) for name in files)
    np.testing.assert_allclose(packed, values, atol=1e-5)
    assert np.std(values) > 0.5


def test_blocks_of_mxfp4_of_another_shape_are_refused(tmp_path: Path) -> None:
    config = GPT_OSS | {"hidden_size": 32, "quantization_config": {"quant_method": "mxfp4"}}
    tensors = {}
    for name, array in random_weights(config).items():
        packed = as_mxfp4(array) if array.ndim == 3 else {"": array}
        packed = packed if len(packed) == 1 else {k: v for k, v in packed.items() if k}
        tensors |= {name + end: np.ascontiguousarray(own) for end, own in packed.items()}
    scales = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[scales] = tensors[scales][:, :-1].copy()
    write_model(tmp_path, config, tensors)
    with pytest.raises(WeightsError, match=r"down_proj\.0\.scales' has shape \[31, 1\]"):
        LLM(str(tmp_path), skip_tokenizer_init=True, backend="numpy")


@needs_numba
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_small_weights_of_experts_agree_on_the_backends(tmp_path: Path, quantization: str) -> None:
    config = QWEN3_MOE | {"hidden_size": 72, "moe_intermediate_size": 48}
    directory = write_model(tmp_path, config, random_weights(config))

    wanted = scores(directory, backend="numpy", quantization=quantization)
    got = scores(directory, backend="jit", quantization=quantization)
    np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen2_moe_shared", "qwen3_next_experts"])
def test_dense_layers_beside_a_shared_expert_have_an_mlp_of_another_size(name: str) -> None:
    config = golden_config(name, mlp_only_layers=[0], intermediate_size=56)
    shapes = expected_tensors(config)
    own, shared = "model.layers.{}.mlp.up_proj.weight", "model.layers.{}.mlp.shared_expert.up_proj"
    assert shapes[own.format(0)] == (56, 32)
    assert shapes[f"{shared.format(1)}.weight"] == (24, 32)
    assert not {own.format(1), f"{shared.format(0)}.weight"} & shapes.keys()


def test_qwen2_moe_runs_without_the_biases_that_its_file_switches_off(tmp_path: Path) -> None:
    source = GOLDEN / "qwen2_moe_shared"
    tensors = load_file(source / "model.safetensors")
    biases = [name for name in tensors if name.endswith("_proj.bias")]
    assert len(biases) == 9
    for folder, has_biases in (("zeros", True), ("none", False)):
        (tmp_path / folder).mkdir()
        zeros = {name: np.zeros_like(tensors[name]) for name in biases if has_biases}
        kept = {name: tensor for name, tensor in tensors.items() if name not in biases}
        save_file({**kept, **zeros}, tmp_path / folder / "model.safetensors")
        config = {**golden_values("qwen2_moe_shared"), "qkv_bias": has_biases}
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    assert greedy(tmp_path / "none") == greedy(tmp_path / "zeros") != greedy(source)


@pytest.mark.parametrize("head_dim", [2, 4, 24, 64])
def test_olmoe_names_the_head_dim_that_its_norms_do_not_fit(head_dim: int) -> None:
    values = golden_values("olmoe_experts")
    fitting = values["hidden_size"] // values["num_attention_heads"]
    assert golden_config("olmoe_experts", head_dim=fitting) == golden_config("olmoe_experts")
    assert head_dim != fitting
    with pytest.raises(ModelError, match=f"head_dim.*must be {fitting}.*{head_dim}"):
        golden_config("olmoe_experts", head_dim=head_dim)
