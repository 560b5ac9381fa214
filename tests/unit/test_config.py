"""Test `ModelConfig`: every family, both spellings, and everything refused or malformed."""

import json
from pathlib import Path
from typing import Any

import pytest
from model_files import hf_config
from tables import table

from mie.checkpoint.config import FAMILIES, ModelConfig, RopeConfig
from mie.errors import ModelError, UnsupportedModelError

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads",)


def load(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(hf_config(architecture, **changes))


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
def test_a_feature_that_is_not_implemented_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"not supported.*LlamaForCausalLM") as error:
        load(**changes)
    assert named in str(error.value)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"attention_bias": True}),
        ("Qwen3ForCausalLM", {"mlp_bias": True}),
        ("Qwen2ForCausalLM", {"mlp_bias": True}),
    ],
)
def test_a_flag_that_transformers_ignores_in_the_family_is_refused(
    architecture: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        load(architecture, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": None, "num_experts": 0, "num_local_experts": 1},
        {"attn_logit_softcapping": None, "residual_multiplier": 1.0, "rope_interleaved": False},
        {"hidden_act": "swish", "partial_rotary_factor": 1.0, "pretraining_tp": 2},
        {"rope_scaling": {}, "layer_types": None, "some_new_key": {"a": 1}},
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
def test_generation_config_decides_the_end_of_sequence(
    tmp_path: Path, generation: dict[str, Any], eos: tuple[int, ...]
) -> None:
    write(tmp_path, "config.json", json.dumps(hf_config(eos_token_id=3)))
    write(tmp_path, "generation_config.json", json.dumps(generation))
    assert ModelConfig.load(tmp_path).eos_token_ids == eos


def test_a_missing_directory_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        ModelConfig.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelConfig.load(tmp_path)
