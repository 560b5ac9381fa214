"""List the families whose layers have experts (mixtures of experts)."""

from collections.abc import Mapping
from typing import Any

from mie.checkpoint.family import BOS_AND_EOS, MULTIPLIERS, Family, Names

_EXPERT_KEYS = ("num_experts", "num_local_experts")
_GRANITE: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    **BOS_AND_EOS,
    **MULTIPLIERS,
}
GRANITE_EXPERTS = Names(
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear.{}",),
    expert_down="block_sparse_moe.output_linear.{}",
)
SHARED_EXPERT = Names(
    gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)
"""The MLP beside experts in Qwen's models."""

_GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

SPARSE_FAMILIES: Mapping[str, Family] = {
    "MixtralForCausalLM": Family(
        title="Mixtral",
        model_type="mixtral",
        defaults={
            **BOS_AND_EOS,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        windows="all",
        implements=_EXPERT_KEYS,
        expert_size="intermediate_size",
        names=Names(
            router="block_sparse_moe.gate",
            expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            expert_down="block_sparse_moe.experts.{}.w2",
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        title="Qwen1.5-MoE, Qwen2, sparse",
        model_type="qwen2_moe",
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "shared_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
        },
        windows="switched",
        implements=("attention_bias", "moe_intermediate_size", *_EXPERT_KEYS),
        always_qkv_bias=True,
        o_bias_key=None,
        expert_size="moe_intermediate_size",
        keys={"shared_expert_intermediate_size": "shared_intermediate_size"},
        names=SHARED_EXPERT,
    ),
    "Qwen3MoeForCausalLM": Family(
        title="Qwen3, sparse",
        model_type="qwen3_moe",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        windows="all switched",
        implements=("attention_bias", "moe_intermediate_size", *_EXPERT_KEYS),
        qk_norm="head",
        expert_size="moe_intermediate_size",
    ),
    "OlmoeForCausalLM": Family(
        title="OLMoE",
        model_type="olmoe",
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        implements=("attention_bias", *_EXPERT_KEYS),
        qk_norm="projection",
        expert_size="intermediate_size",
    ),
    "GraniteMoeForCausalLM": Family(
        title="Granite 3, sparse",
        model_type="granitemoe",
        defaults=_GRANITE,
        implements=("attention_bias", *MULTIPLIERS, *_EXPERT_KEYS),
        expert_size="intermediate_size",
        names=GRANITE_EXPERTS,
    ),
    "GraniteMoeSharedForCausalLM": Family(
        title="Granite, sparse with a shared expert",
        model_type="granitemoeshared",
        defaults={**_GRANITE, "shared_intermediate_size": 0},
        implements=("attention_bias", *MULTIPLIERS, *_EXPERT_KEYS),
        expert_size="intermediate_size",
        names=GRANITE_EXPERTS,
    ),
    "GptOssForCausalLM": Family(
        title="gpt-oss",
        model_type="gpt_oss",
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_theta": 150000.0,
            "rope_parameters": _GPT_OSS_ROPE,
        },
        windows="pattern",
        implements=("attention_bias", "swiglu_limit", *_EXPERT_KEYS),
        expert_size="intermediate_size",
        expert_activation="clamped_silu",
        experts_have_biases=True,
        names=Names(
            router="mlp.router",
            expert_gate_up=("mlp.experts.gate_up_proj.{}",),
            experts_take_turns=True,
            expert_down="mlp.experts.down_proj.{}",
            sinks="self_attn.sinks",
        ),
    ),
}
