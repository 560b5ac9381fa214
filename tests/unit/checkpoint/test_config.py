"""Test `ModelConfig`: every family, both spellings, and everything refused or malformed."""

import json
from pathlib import Path
from typing import Any

import pytest
from model_files import golden_config, golden_values, hf_config
from tables import table

from mie.checkpoint.config import load_model_config, model_config_from_hf
from mie.checkpoint.families import FAMILIES
from mie.errors import ModelError, UnsupportedModelError
from mie.model.config import ModelConfig, RopeConfig

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads",)


def load(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    return model_config_from_hf(hf_config(architecture, **changes))


# The families, by the defaults of transformers' configuration classes.


def test_llama_flags_and_defaults() -> None:
    config = load(num_key_value_heads=..., max_position_embeddings=...)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 4)
    assert config.head_dim == 4
    assert config.rms_norm_eps == 1e-6
    assert config.max_position_embeddings == 2048
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert not config.tie_word_embeddings
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm))
    assert config.layer_windows == (None, None)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.dtype == "float32"


def test_mistral_slides_in_every_layer_by_default() -> None:
    config = load("MistralForCausalLM", max_position_embeddings=...)
    assert config.layer_windows == (4096, 4096)
    assert config.max_position_embeddings == 131072
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_qwen3_has_norms_of_queries_and_keys_and_wide_heads() -> None:
    config = load("Qwen3ForCausalLM")
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (False, False, "head")
    assert config.head_dim == 128
    config = load("Qwen3ForCausalLM", head_dim=6, attention_bias=True)
    assert (config.head_dim, config.qkv_bias, config.o_bias) == (6, True, True)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows_need_the_switch_and_start_at_max_window_layers(architecture: str) -> None:
    window = {"sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}
    assert load(architecture, **window).layer_windows == (None, None, None)
    on = load(architecture, use_sliding_window=True, **window)
    assert on.layer_windows == (None, 5, 5)
    window["max_window_layers"] = ...
    assert load(architecture, use_sliding_window=True, **window).layer_windows == (None,) * 3


def test_qwen_layer_types_decide_each_layer() -> None:
    layer_types = ["sliding_attention", "full_attention"]
    config = load(
        "Qwen3ForCausalLM", use_sliding_window=True, sliding_window=5, layer_types=layer_types
    )
    assert config.layer_windows == (5, None)


def test_model_type_replaces_missing_architectures() -> None:
    assert load(architectures=..., model_type="qwen3").architecture == "Qwen3ForCausalLM"


def test_the_first_supported_of_several_architectures_counts() -> None:
    config = load(architectures=["Other", "Qwen2ForCausalLM"])
    assert config.architecture == "Qwen2ForCausalLM"


# Two spellings, one meaning.

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    | {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_transformers_4_and_5_spellings_agree(scaling: dict[str, Any], type_key: str) -> None:
    five = load(rope_parameters={**scaling, "rope_theta": 777.0}, dtype="bfloat16")
    old = {key: value for key, value in scaling.items() if key != "rope_type"}
    four = load(
        rope_theta=777.0,
        rope_scaling={type_key: scaling["rope_type"], **old},
        torch_dtype="bfloat16",
    )
    assert four == five
    assert five.rope.theta == 777.0
    assert five.dtype == "bfloat16"
    for key in old:
        assert getattr(five.rope, key) == scaling[key]


def test_yarn_without_a_factor_takes_it_from_the_two_contexts() -> None:
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}
    assert load(rope_parameters=scaling, max_position_embeddings=64).rope.factor == 4.0


def test_an_original_context_beside_the_scaling_takes_precedence() -> None:
    scaling = {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 16}
    config = load(rope_parameters=scaling, original_max_position_embeddings=20)
    assert config.rope.original_max_position_embeddings == 20


# Derived sizes.


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({}, 64),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_context_length(scaling: dict[str, Any], context: int) -> None:
    assert load(rope_parameters=scaling).context_length == context


# Refused by name.


@pytest.mark.parametrize(("changes", "named"), table("model_configs", "not implemented"))
def test_a_feature_that_is_not_implemented_is_refused_by_name(changes, named) -> None:
    with pytest.raises(UnsupportedModelError, match=r"not supported.*LlamaForCausalLM") as error:
        load(**changes)
    assert named in str(error.value)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "flag"),
    [
        ("MistralForCausalLM", "attention_bias"),
        ("Qwen3ForCausalLM", "mlp_bias"),
        ("Qwen2ForCausalLM", "mlp_bias"),
    ],
)
def test_a_flag_that_transformers_ignores_in_the_family_is_refused(architecture, flag) -> None:
    with pytest.raises(UnsupportedModelError, match=flag):
        load(architecture, **{flag: True})


ROPE = "rope_parameters"
OF_FAMILIES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe_dense_layer", {"num_experts_per_tok": 6}, "num_experts_per_tok must be at most 5"),
    ("qwen3_moe_dense_layer", {"num_experts_per_tok": 0}, "num_experts_per_tok must be at least 1"),
    ("qwen3_moe_dense_layer", {"num_local_experts": 1025}, "must be at most 1024"),
    (
        "qwen3_moe_dense_layer",
        {"num_local_experts": 1024, "num_hidden_layers": 40},
        "at most 32768 in all layers",
    ),
    ("qwen3_moe_dense_layer", {"mlp_only_layers": [3]}, "must be numbers of layers, 0 … 2"),
    ("qwen3_moe_dense_layer", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
    ("qwen3_moe_dense_layer", {"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
    ("qwen3_moe_dense_layer", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
    ("qwen3_moe_dense_layer", {"moe_intermediate_size": None}, "moe_intermediate_size"),
    ("olmoe_experts", {"clip_qkv": 8.0}, "clip_qkv"),
    ("lfm2_experts", {"norm_topk_prob": False}, "norm_topk_prob false is not supported in LFM2, s"),
    ("lfm2_experts", {"routed_scaling_factor": 2.0}, "routed_scaling_factor 2.0 is not supported"),
    ("lfm2_experts", {"num_dense_layers": 4}, "num_dense_layers must be at most 3"),
    ("lfm2_experts", {"use_expert_bias": 1}, "use_expert_bias must be true or false"),
    ("gpt_oss_sinks", {"swiglu_limit": 3.0}, "swiglu_limit 3.0 is not supported"),
    ("gpt_oss_sinks", {"swiglu_alpha": 1.0}, "swiglu_alpha 1.0 is not supported"),
    ("qwen35_delta", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
    ("qwen35_delta", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
    ("qwen35_delta", {"linear_key_head_dim": "wide"}, "linear_key_head_dim"),
    ("qwen35_delta", {"layer_types": ["linear_attention"] * 3}, "without any attention layer"),
    ("qwen35_delta", {"layer_types": ["mamba", "full_attention", "mamba"]}, "mamba"),
    ("qwen35_delta", {"hidden_act": "gelu_pytorch_tanh"}, "activation"),
    ("granite4_mamba", {"mamba_n_heads": 5}, "mamba_n_heads"),
    ("granite4_mamba", {"mamba_d_head": 7}, "mamba_d_head"),
    ("granite4_mamba", {"mamba_n_groups": 3}, "mamba_n_groups"),
    ("granite4_mamba", {"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
    ("granite4_mamba", {"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
    ("smollm3_no_rope", {"no_rope_layers": [1]}, "no_rope_layers"),
    ("smollm3_no_rope", {"no_rope_layers": "10"}, "no_rope_layers"),
    ("smollm3_no_rope", {"no_rope_layers": [2, 0]}, "no_rope_layers"),
    ("phi3_long", {ROPE: {"short_factor": [1.0]}}, "short_factor must be a list of 8 numbers"),
    ("phi3_long", {ROPE: {"long_factor": ["x"] * 8}}, "must be a number"),
    ("phi3_long", {ROPE: {"long_factor": None}}, "long_factor must be a list"),
    ("phi3_fused", {ROPE: {"partial_rotary_factor": 0.05}}, "must turn pairs of channels"),
    ("hunyuan_rotated_norms", {ROPE: {"alpha": 0.0}}, "depends on the current length"),
    ("hunyuan_rotated_norms", {ROPE: {"alpha": -1.0}}, "alpha"),
]


@pytest.mark.parametrize(("name", "changes", "message"), OF_FAMILIES)
def test_a_value_that_a_family_does_not_allow_is_refused_by_name(name, changes, message) -> None:
    if ROPE in changes:
        changes = {ROPE: {**golden_values(name)[ROPE], **changes[ROPE]}}
    with pytest.raises(ModelError, match=message):
        golden_config(name, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": None, "num_experts": 0, "num_local_experts": 1},
        {"attn_logit_softcapping": None, "residual_multiplier": 1.0, "rope_interleaved": False},
        {"hidden_act": "swish", "partial_rotary_factor": 1.0, "pretraining_tp": 2},
        {"rope_scaling": {}, "layer_types": None, "some_new_key": {"a": 1}},
        {"rope_scaling": {"attn_factor": 1.0, "apply_yarn_scaling": True, "long_mscale": None}},
    ],
)
def test_harmless_keys_change_nothing(changes: dict[str, Any]) -> None:
    assert load(**changes) == load()


def test_an_unknown_architecture_names_the_nearest_and_all_supported() -> None:
    with pytest.raises(UnsupportedModelError) as error:
        load("Llama9ForCausalLM")
    message = str(error.value)
    assert "architecture 'Llama9ForCausalLM' (nearest: 'LlamaForCausalLM')" in message
    assert all(name in message for name in FAMILIES)


OTHERS = (
    *("GPT2LMHeadModel", "BloomForCausalLM", "OPTForCausalLM", "MambaForCausalLM", "BertModel"),
    *("GPTNeoXForCausalLM", "T5ForConditionalGeneration", "RWKVForCausalLM", "Model", "x"),
    *("FalconForCausalLM", "ForCausalLM"),
)


@pytest.mark.parametrize("name", OTHERS)
def test_an_architecture_of_another_kind_gets_no_nearest_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        load(name)
    assert f"architecture {name!r}" in str(error.value)
    assert "nearest" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in sorted(FAMILIES) if name.index("For") >= 5])
def test_a_misspelt_architecture_gets_its_own_name(name: str) -> None:
    stem, ending = name[: name.index("For")], name[name.index("For") :]
    with pytest.raises(UnsupportedModelError) as error:
        load(f"{stem}x{ending}")
    assert f"(nearest: {name!r})" in str(error.value)


# Malformed.


@pytest.mark.parametrize("key", SIZES)
def test_the_sizes_are_required(key: str) -> None:
    for absent in (..., None):
        with pytest.raises(ModelError, match=f"config.json: required key '{key}'"):
            load(**{key: absent})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        *table("model_configs", "bad values"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rope_scaling": {**SCALINGS[1], "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {**SCALINGS[2], "truncate": "no"}}, "truncate"),
        ({"architectures": ..., "model_type": ...}, "'architectures' nor 'model_type'"),
    ],
)
def test_a_bad_value_names_file_and_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelError) as error:
        load(**changes)
    assert not isinstance(error.value, UnsupportedModelError)
    assert "config.json" in str(error.value)
    assert key in str(error.value)


def test_sliding_layers_without_a_window_are_refused() -> None:
    with pytest.raises(ModelError, match=r"sliding_window is null or use_sliding_window is false"):
        load("Qwen2ForCausalLM", sliding_window=4, layer_types=["sliding_attention"] * 2)


# Files.


def write(directory: Path, name: str, text: str | bytes) -> Path:
    path = directory / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("generation", "eos"),
    [
        ({"eos_token_id": [5, 6, 5]}, (5, 6)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": None}, (3,)),
        ({"temperature": 1.0}, (3,)),
    ],
)
def test_generation_config_decides_the_end_of_sequence(tmp_path, generation, eos) -> None:
    write(tmp_path, "config.json", json.dumps(hf_config(eos_token_id=3)))
    write(tmp_path, "generation_config.json", json.dumps(generation))
    assert load_model_config(tmp_path).eos_token_ids == eos


def test_a_missing_directory_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model_config(tmp_path)
