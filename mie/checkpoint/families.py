"""List the supported families: a row of flags and defaults for each, and no class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

QkNorm = Literal["head", "projection", "rotated head"]


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a layer's tensors, without ".weight". A norm that is None does not exist."""

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    """Normalises the result of attention, before it is added to the hidden states."""
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three matrices, or one that holds their rows in this order."""
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two matrices, or one that holds their rows in this order."""
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    """Like `gate_up`, with the number of the expert. A file may stack the matrices of all."""
    expert_down: str = "mlp.experts.{}.down_proj"


@dataclass(frozen=True, kw_only=True)
class Family:
    """The flags of a family that its ``config.json`` does not state."""

    title: str
    """Its models' name."""
    model_type: str
    """Its ``model_type``, or for a part of another model the one in ``text_config``."""
    defaults: Mapping[str, Any]
    """The defaults of transformers' configuration class for absent keys.

    A key that is present and null means "none", so they are merged under the file's own keys.
    """
    windows: Literal["none", "all", "all switched", "switched", "pattern"] = "none"
    """Which layers have the ``sliding_window`` if ``layer_types`` does not say.

    "all" and "none" ignore ``layer_types``. "switched" needs ``use_sliding_window``, and begins at
    ``max_window_layers``, and "all switched" at the first layer. In "pattern" every
    ``sliding_window_pattern``-th layer has none.
    """
    implements: tuple[str, ...] = ()
    """The keys of `mie.checkpoint.refusals` that are not refused in this family."""
    always_qkv_bias: bool = False
    """Whether queries, keys and values have biases, whether the file says so or not."""
    o_bias_key: str | None = "attention_bias"
    """The flag for a bias of attention's output, or None if it never has one."""
    qk_norm: QkNorm | None = None
    """The norms of queries and keys: of each head, before or after RoPE, or of all heads."""
    rope_by_type: bool = False
    """Whether ``rope_scaling`` is for full attention, and ``rope_parameters`` by layer type."""
    rope_is_interleaved: bool = False
    """Whether RoPE turns channels 2i and 2i + 1, and not i and i + Dh/2."""
    rope_layers: Literal["all", "listed", "sliding", "switched"] = "all"
    """Which layers have RoPE.

    "listed" is ``no_rope_layers``, "sliding" is those with a window, if there are any, and
    "switched" is all or none by ``position_embedding_type``.
    """
    norm_offset: int = 0
    """Added to the weights of all norms."""
    expert_size: str | None = None
    """The key of the intermediate size of its experts, or None if it has none."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    names: Names = field(default_factory=Names)


_BOS_AND_EOS: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
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
    **_BOS_AND_EOS,
}
_MULTIPLIERS = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GRANITE: Mapping[str, Any] = {"max_position_embeddings": 2048, **_BOS_AND_EOS, **_MULTIPLIERS}
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
_GRANITE_MOE: Mapping[str, Any] = {**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2}
_EXPERT_KEYS = ("num_experts", "num_local_experts")
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
_GRANITE_EXPERTS = Names(
    gate_up=("shared_mlp.input_linear",),
    down="shared_mlp.output_linear",
    router="block_sparse_moe.router.layer",
    expert_gate_up=("block_sparse_moe.input_linear.{}",),
    expert_down="block_sparse_moe.output_linear.{}",
)
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
        defaults={"max_position_embeddings": 2048, **_BOS_AND_EOS},
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
        implements=("attention_bias", "mlp_bias", *_MULTIPLIERS),
    ),
    "GraniteMoeHybridForCausalLM": Family(
        title="Granite 4, dense",
        model_type="granitemoehybrid",
        defaults={
            **_GRANITE,
            "num_local_experts": 8,
            "shared_intermediate_size": 1024,
            "layer_types": ["linear_attention"],
        },
        implements=("attention_bias", *_MULTIPLIERS),
        rope_layers="switched",
        names=Names(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
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
            **_BOS_AND_EOS,
        },
        implements=("use_bias",),
        rope_is_interleaved=True,
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        title="Hunyuan, dense",
        model_type="hunyuan_v1_dense",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, **_BOS_AND_EOS},
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
    "MixtralForCausalLM": Family(
        title="Mixtral",
        model_type="mixtral",
        defaults={
            **_MISTRAL,
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
        defaults=_GRANITE_MOE,
        implements=("attention_bias", *_MULTIPLIERS, *_EXPERT_KEYS),
        expert_size="intermediate_size",
        names=_GRANITE_EXPERTS,
    ),
    "GraniteMoeSharedForCausalLM": Family(
        title="Granite, sparse with a shared expert",
        model_type="granitemoeshared",
        defaults={**_GRANITE_MOE, "shared_intermediate_size": 0},
        implements=("attention_bias", *_MULTIPLIERS, *_EXPERT_KEYS),
        expert_size="intermediate_size",
        names=_GRANITE_EXPERTS,
    ),
}
"""The supported families by the name in ``architectures``."""
