"""List the supported families: a row of flags and defaults for each, and no class."""

from collections.abc import Mapping
from typing import Any

from mie.checkpoint.family import BOS_AND_EOS, MULTIPLIERS, Family, Names
from mie.checkpoint.recurrent_families import RECURRENT_FAMILIES
from mie.checkpoint.sparse_families import SPARSE_FAMILIES

__all__ = ["FAMILIES", "Family", "Names"]

_QWEN2: Mapping[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MISTRAL: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    **BOS_AND_EOS,
}
_GRANITE: Mapping[str, Any] = {"max_position_embeddings": 2048, **BOS_AND_EOS, **MULTIPLIERS}
_OLMO2: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}
_GEMMA: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA2: Mapping[str, Any] = {
    **_GEMMA,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GLM: Mapping[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}
_MINISTRAL3_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

_FUSED_MLP = ("mlp.gate_up_proj",)
_NORMS_AFTER = Names(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)
_NORMS_AROUND = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        title="Llama, TinyLlama, SmolLM, Falcon 3, Yi",
        model_type="llama",
        defaults={"max_position_embeddings": 2048, **BOS_AND_EOS},
        implements=("attention_bias", "mlp_bias"),
    ),
    "MistralForCausalLM": Family(
        title="Mistral", model_type="mistral", defaults=_MISTRAL, windows="all"
    ),
    "MinistralForCausalLM": Family(
        title="Ministral", model_type="ministral", defaults=_MISTRAL, windows="pattern"
    ),
    "Ministral3ForCausalLM": Family(
        title="Ministral 3",
        model_type="ministral3",
        defaults={
            **_MISTRAL,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": _MINISTRAL3_ROPE,
        },
        windows="all",
        implements=("llama_4_scaling_beta",),
    ),
    "Qwen2ForCausalLM": Family(
        title="Qwen2, Qwen2.5",
        model_type="qwen2",
        defaults=_QWEN2,
        windows="switched",
        implements=("attention_bias",),
        always_qkv_bias=True,
        o_bias_key=None,
    ),
    "Qwen3ForCausalLM": Family(
        title="Qwen3",
        model_type="qwen3",
        defaults={**_QWEN2, "head_dim": 128},
        windows="switched",
        implements=("attention_bias",),
        qk_norm="head",
    ),
    "SmolLM3ForCausalLM": Family(
        title="SmolLM3",
        model_type="smollm3",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
        windows="switched",
        implements=("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"),
        rope_layers="listed",
    ),
    "GraniteForCausalLM": Family(
        title="Granite 3",
        model_type="granite",
        defaults=_GRANITE,
        implements=("attention_bias", "mlp_bias", *MULTIPLIERS),
    ),
    "Olmo2ForCausalLM": Family(
        title="OLMo 2",
        model_type="olmo2",
        defaults=_OLMO2,
        implements=("attention_bias",),
        qk_norm="projection",
        names=_NORMS_AFTER,
    ),
    "Olmo3ForCausalLM": Family(
        title="OLMo 3",
        model_type="olmo3",
        defaults={
            **_OLMO2,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "rope_theta": 500000.0,
        },
        windows="pattern",
        implements=("attention_bias",),
        qk_norm="projection",
        rope_by_type=True,
        names=_NORMS_AFTER,
    ),
    "GemmaForCausalLM": Family(
        title="Gemma",
        model_type="gemma",
        defaults={**_GEMMA, "num_key_value_heads": 16},
        implements=("attention_bias",),
        norm_offset=1,
        scales_embeddings=True,
    ),
    "Gemma2ForCausalLM": Family(
        title="Gemma 2",
        model_type="gemma2",
        defaults={
            **_GEMMA2,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        windows="pattern",
        implements=("attention_bias", "attn_logit_softcapping", "final_logit_softcapping"),
        norm_offset=1,
        scales_embeddings=True,
        names=_NORMS_AROUND,
    ),
    "Gemma3ForCausalLM": Family(
        title="Gemma 3, text",
        model_type="gemma3_text",
        defaults={
            **_GEMMA2,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,  # the file of the 4B model relies on these two
            "vocab_size": 262208,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        windows="pattern",
        implements=("attention_bias", "final_logit_softcapping"),
        qk_norm="head",
        rope_by_type=True,
        norm_offset=1,
        scales_embeddings=True,
        names=_NORMS_AROUND,
    ),
    "Phi3ForCausalLM": Family(
        title="Phi-3, Phi-4, Phi-4-mini",
        model_type="phi3",
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "bos_token_id": 1,
            "eos_token_id": 32000,
        },
        windows="all",
        implements=("longrope", "partial_rotary_factor"),
        names=Names(qkv=("self_attn.qkv_proj",), gate_up=_FUSED_MLP),
    ),
    "GlmForCausalLM": Family(
        title="GLM-4-9B",
        model_type="glm",
        defaults=_GLM,
        implements=("attention_bias", "partial_rotary_factor"),
        o_bias_key=None,
        rope_is_interleaved=True,
        names=Names(gate_up=_FUSED_MLP),
    ),
    "Glm4ForCausalLM": Family(
        title="GLM-4-0414",
        model_type="glm4",
        defaults=_GLM,
        implements=("attention_bias", "partial_rotary_factor"),
        o_bias_key=None,
        rope_is_interleaved=True,
        names=Names(
            attention_post_norm="post_self_attn_layernorm",
            mlp_post_norm="post_mlp_layernorm",
            gate_up=_FUSED_MLP,
        ),
    ),
    "Exaone4ForCausalLM": Family(
        title="EXAONE 4",
        model_type="exaone4",
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        windows="pattern",
        qk_norm="head",
        rope_layers="sliding",
        names=_NORMS_AFTER,
    ),
    "Ernie4_5ForCausalLM": Family(
        title="ERNIE 4.5, dense",
        model_type="ernie4_5",
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 2,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            **BOS_AND_EOS,
        },
        implements=("use_bias",),
        rope_is_interleaved=True,
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        title="Hunyuan, dense",
        model_type="hunyuan_v1_dense",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, **BOS_AND_EOS},
        implements=("attention_bias", "alpha"),
        qk_norm="rotated head",
        names=Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
    ),
    "SeedOssForCausalLM": Family(
        title="Seed-OSS",
        model_type="seed_oss",
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        implements=("attention_bias", "mlp_bias"),
        o_bias_key="attention_out_bias",
    ),
    **SPARSE_FAMILIES,
    **RECURRENT_FAMILIES,
}
"""The supported families by the name in ``architectures``."""
