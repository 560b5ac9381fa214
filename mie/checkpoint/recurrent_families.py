"""List the families some of whose layers keep a state."""

from __future__ import annotations

from collections.abc import Mapping

from mie.checkpoint.family import Family, Names, Recurrent

MULTIPLIERS = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""Granite's factors, which change nothing by default."""

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

RECURRENT_FAMILIES: Mapping[str, Family] = {
    "Lfm2ForCausalLM": Family(
        title="LFM2, dense",
        model_type="lfm2",
        defaults={
            "max_position_embeddings": 128_000,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "norm_eps": 1e-5,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        o_bias_key=None,
        qk_norm="head",
        keys={
            "norm_eps": "rms_norm_eps",
            "tie_embedding": "tie_word_embeddings",
            "block_ff_dim": "intermediate_size",
        },
        recurrent=Recurrent(
            kind="conv",
            layer_types=("conv",),
            mixed=("conv.in_proj",),
            conv=("conv.conv",),
            out="conv.out_proj",
        ),
        names=Names(
            attention_norm="operator_norm",
            mlp_norm="ffn_norm",
            q_norm="self_attn.q_layernorm",
            k_norm="self_attn.k_layernorm",
            gate_up=("feed_forward.w1", "feed_forward.w3"),
            down="feed_forward.w2",
            attention_out="self_attn.out_proj",
            final_norm="embedding_norm",
        ),
    ),
    "Qwen3_5ForCausalLM": Family(
        title="Qwen3.5, text",
        model_type="qwen3_5_text",
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
        implements=("attention_bias", "partial_rotary_factor", "mrope_section"),
        qk_norm="head",
        norm_offset=1,
        gates_attention=True,
        recurrent=_DELTA,
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
        title="Granite 4, dense",
        model_type="granitemoehybrid",
        defaults={
            **MULTIPLIERS,
            "max_position_embeddings": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_local_experts": 8,
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
        implements=("attention_bias", *MULTIPLIERS),
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
        names=Names(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
    ),
}
"""The families by the name in ``architectures``."""
