"""List the families some of whose layers keep a state."""

from collections.abc import Mapping
from dataclasses import replace

from mie.checkpoint.family import MULTIPLIERS, Family, Names, Recurrent
from mie.checkpoint.sparse_families import GRANITE_EXPERTS

_DELTA = Recurrent(
    kind="delta",
    layer_types=("linear_attention",),
    mixed=("linear_attn.in_proj_qkv",),
    gate=("linear_attn.in_proj_z",),
    small=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    conv=("linear_attn.conv1d",),
    vectors="linear_attn.",
    norm="linear_attn.norm",
    out="linear_attn.out_proj",
)

_QWEN_SIZES = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

_QWEN_EXPERTS = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "shared_intermediate_size": 512,
}
_QWEN_SPARSE = (
    *("attention_bias", "partial_rotary_factor", "mrope_section"),
    *("moe_intermediate_size", "num_experts", "num_local_experts"),
)
_QWEN_SHARED = Names(
    gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)

_LFM2 = {
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHORT_CONV = Recurrent(
    kind="conv",
    layer_types=("conv",),
    mixed=("conv.in_proj",),
    conv=("conv.conv",),
    out="conv.out_proj",
)
_LFM2_NAMES = Names(
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    attention_out="self_attn.out_proj",
    final_norm="embedding_norm",
)

RECURRENT_FAMILIES: Mapping[str, Family] = {
    "Lfm2ForCausalLM": Family(
        title="LFM2, dense",
        model_type="lfm2",
        defaults={
            **_LFM2,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        o_bias_key=None,
        qk_norm="head",
        keys={
            "norm_eps": "rms_norm_eps",
            "tie_embedding": "tie_word_embeddings",
            "block_ff_dim": "intermediate_size",
        },
        recurrent=_SHORT_CONV,
        names=_LFM2_NAMES,
    ),
    "Lfm2MoeForCausalLM": Family(
        title="LFM2, sparse",
        model_type="lfm2_moe",
        defaults={
            **_LFM2,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_dense_layers": 2,
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
        },
        implements=("moe_intermediate_size", "num_experts", "num_local_experts"),
        o_bias_key=None,
        qk_norm="head",
        expert_size="moe_intermediate_size",
        keys={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
        recurrent=_SHORT_CONV,
        names=replace(
            _LFM2_NAMES,
            router="feed_forward.gate",
            router_bias="feed_forward.expert_bias",
            expert_gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
            expert_down="feed_forward.experts.{}.w2",
        ),
    ),
    "Qwen3_5ForCausalLM": Family(
        title="Qwen3.5, text",
        model_type="qwen3_5_text",
        defaults={**_QWEN_SIZES, "num_key_value_heads": 4},
        implements=("attention_bias", "partial_rotary_factor", "mrope_section"),
        qk_norm="head",
        norm_offset=1,
        gates_attention=True,
        recurrent=_DELTA,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        title="Qwen3.5, text, sparse",
        model_type="qwen3_5_moe_text",
        defaults={**_QWEN_SIZES, **_QWEN_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
        implements=_QWEN_SPARSE,
        qk_norm="head",
        norm_offset=1,
        gates_attention=True,
        expert_size="moe_intermediate_size",
        keys={"shared_expert_intermediate_size": "shared_intermediate_size"},
        recurrent=_DELTA,
        names=_QWEN_SHARED,
    ),
    "Qwen3NextForCausalLM": Family(
        title="Qwen3-Next",
        model_type="qwen3_next",
        defaults={
            **_QWEN_SIZES,
            **_QWEN_EXPERTS,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        implements=_QWEN_SPARSE,
        qk_norm="head",
        norm_offset=1,
        gates_attention=True,
        expert_size="moe_intermediate_size",
        keys={"shared_expert_intermediate_size": "shared_intermediate_size"},
        recurrent=Recurrent(
            kind="delta",
            layer_types=("linear_attention",),
            mixed=("linear_attn.in_proj_qkvz",),
            gate=("linear_attn.in_proj_qkvz",),
            small=("linear_attn.in_proj_ba",),
            layout="by group",
            conv=("linear_attn.conv1d",),
            vectors="linear_attn.",
            norm="linear_attn.norm",
            out="linear_attn.out_proj",
        ),
        names=_QWEN_SHARED,
    ),
    "OlmoHybridForCausalLM": Family(
        title="OLMo hybrid",
        model_type="olmo_hybrid",
        defaults={
            "max_position_embeddings": 65536,
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
            "full_attention_interval": 4,
            "eos_token_id": 100257,
        },
        implements=("attention_bias",),
        qk_norm="projection",
        rope_layers="given",
        recurrent=Recurrent(
            kind="delta",
            layer_types=("linear_attention",),
            mixed=("linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj"),
            gate=("linear_attn.g_proj",),
            small=("linear_attn.b_proj", "linear_attn.a_proj"),
            conv=("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
            vectors="linear_attn.",
            norm="linear_attn.o_norm",
            norm_eps=1e-5,
            out="linear_attn.o_proj",
            names=Names(attention_norm="attention_layer_norm", mlp_norm="feedforward_layer_norm"),
        ),
        names=Names(
            attention_norm=None,
            attention_post_norm="post_attention_layernorm",
            mlp_norm=None,
            mlp_post_norm="post_feedforward_layernorm",
        ),
    ),
    "GraniteMoeHybridForCausalLM": Family(
        title="Granite 4",
        model_type="granitemoehybrid",
        defaults={
            **MULTIPLIERS,
            "max_position_embeddings": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
        implements=("attention_bias", "num_experts", "num_local_experts", *MULTIPLIERS),
        expert_size="intermediate_size",
        rope_layers="switched",
        recurrent=Recurrent(
            kind="mamba",
            layer_types=("mamba", "linear_attention"),
            mixed=("mamba.in_proj",),
            gate=("mamba.in_proj",),
            small=("mamba.in_proj",),
            layout="joined",
            conv=("mamba.conv1d",),
            vectors="mamba.",
            norm="mamba.norm",
            out="mamba.out_proj",
        ),
        names=GRANITE_EXPERTS,
    ),
}
"""The families by the name in ``architectures``."""
