"""Compare every family with Hugging Face transformers, on random tiny models of many shapes.

    pip install "mie[bench]" safetensors
    python scripts/compare_families.py [MODEL_TYPE ...] [--seeds 3] [--backends numpy jit]

Each model has other sizes, numbers of heads and windows, with and without tied embeddings. Its
logits for 40 tokens and 64 greedy ones must be within 3e-5 of transformers' (relative to the
largest), in chunks of 13 tokens, and its greedy tokens equal.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_golden import Unsuitable, all_logits, greedy_tokens, load, randomize, restore_names
from transformers import AutoConfig, AutoModelForCausalLM

from mie import LLM, SamplingParams
from mie.checkpoint.families import FAMILIES

TOLERANCE = 3e-5
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 128}


def longrope(pairs: int, original: int, rng: random.Random) -> dict[str, Any]:
    """Return parameters of LongRoPE for a context of 256 tokens."""
    short, long = ([rng.uniform(1, top) for _ in range(pairs)] for top in (1.2, 4))
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        },
    }


def sizes(rng: random.Random) -> dict[str, Any]:
    """Return sizes of a tiny model."""
    num_kv_heads = rng.choice([1, 2, 3])
    num_heads = num_kv_heads * rng.choice([1, 2, 3])
    return {
        "hidden_size": num_heads * rng.choice([8, 16]),
        "intermediate_size": rng.choice([40, 64, 72]),
        "num_hidden_layers": rng.choice([2, 3]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "vocab_size": 71,
        "tie_word_embeddings": rng.random() < 0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def config_of(model_type: str, rng: random.Random) -> dict[str, Any]:
    """Return a random configuration of a family."""
    config = sizes(rng)
    layers, window = config["num_hidden_layers"], rng.choice([5, 13, 30])
    mixed = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    bias = rng.random() < 0.5
    theta = rng.choice([1e4, 5e5])
    plain = {"rope_type": "default", "rope_theta": theta}
    by_type = {"sliding_attention": plain, "full_attention": {**plain, "rope_theta": 1e3}}
    gemma = {"query_pre_attn_scalar": rng.choice([16, 24]), "hidden_size": 48, "layer_types": mixed}
    gemma |= {"num_attention_heads": config["num_attention_heads"] // 3 * 3 or 3}
    gemma |= {"num_key_value_heads": gemma["num_attention_heads"], "sliding_window": window}
    multipliers = {
        "attention_multiplier": rng.choice([0.1, 0.3]),
        "embedding_multiplier": rng.choice([0.5, 12.0]),
        "residual_multiplier": rng.choice([0.22, 1.5]),
        "logits_scaling": rng.choice([0.5, 2.0]),
    }
    glm = {"attention_bias": bias, "rope_parameters": {**plain, "partial_rotary_factor": 0.5}}
    phi = rng.choice([longrope(8, 256, rng), longrope(8, 32, rng), {"sliding_window": window}])
    no_head_dim = {"hidden_size": 16 * config["num_attention_heads"]}
    number = rng.choice([3, 4, 8])
    experts = {"num_experts": number, "num_local_experts": number}
    experts |= {"num_experts_per_tok": rng.choice([1, 2, number])}
    groups = rng.choice([1, 2])
    recurrent = ["conv" if model_type == "lfm2" else "linear_attention"] * (layers - 1)
    deltas = {
        "linear_num_key_heads": groups,
        "linear_num_value_heads": groups * rng.choice([1, 2]),
        "linear_key_head_dim": rng.choice([8, 20]),
        "linear_value_head_dim": rng.choice([12, 16]),
        "linear_conv_kernel_dim": rng.choice([3, 4]),
    }
    own: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": window},
        "mixtral": {**experts, "sliding_window": rng.choice([None, window])},
        "qwen2_moe": {
            **no_head_dim,
            **experts,
            "norm_topk_prob": rng.random() < 0.5,
            "moe_intermediate_size": rng.choice([16, 24]),
            "shared_expert_intermediate_size": rng.choice([20, 32]),
            "mlp_only_layers": rng.choice([[], [0]]),
            "decoder_sparse_step": rng.choice([1, 2]),
        },
        "qwen3_moe": {
            **experts,
            "attention_bias": bias,
            "norm_topk_prob": rng.random() < 0.5,
            "moe_intermediate_size": rng.choice([16, 24]),
            "mlp_only_layers": rng.choice([[], [0]]),
            "decoder_sparse_step": rng.choice([1, 2]),
            "use_sliding_window": bias,
            "sliding_window": window,
        },
        "gpt_oss": {
            **experts,
            "sliding_window": window,
            "layer_types": mixed,
            "rope_parameters": rng.choice([YARN, {**YARN, "truncate": False}]),
        },
        "olmoe": {**no_head_dim, **experts, "attention_bias": bias, "norm_topk_prob": not bias},
        "granitemoe": {**no_head_dim, **multipliers, **experts, "attention_bias": bias},
        "granitemoeshared": {
            **no_head_dim,
            **multipliers,
            **experts,
            "shared_intermediate_size": rng.choice([0, 24]),
        },
        "ministral": {"sliding_window": window, "layer_types": mixed},
        "ministral3": {
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0}
            | {"mscale_all_dim": 1.0}
        },
        "llama": {"attention_bias": bias, "mlp_bias": not bias},
        "smollm3": {"no_rope_layers": [rng.choice([0, 1]) for _ in range(layers)]},
        "granite": {**no_head_dim, **multipliers, "attention_bias": bias},
        "granitemoehybrid": {
            **no_head_dim,
            **multipliers,
            **rng.choice([{"num_local_experts": 0}, experts]),
            "shared_intermediate_size": config["intermediate_size"],
            "layer_types": [*recurrent, "full_attention"],
            "position_embedding_type": rng.choice(["rope", None]),
            "mamba_n_heads": 2 * groups,
            "mamba_n_groups": groups,
            "mamba_d_state": rng.choice([8, 12]),
            "mamba_expand": rng.choice([1, 2]),
            "mamba_conv_bias": bias,
            "mamba_proj_bias": not bias,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
        "lfm2": {
            **no_head_dim,
            "layer_types": [*recurrent, "full_attention"],
            "conv_L_cache": rng.choice([2, 3, 4]),
            "conv_bias": bias,
            "block_auto_adjust_ff_dim": not bias,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.3,
        },
        "qwen3_5_text": {
            **deltas,
            "layer_types": [*recurrent, "full_attention"],
            "attention_bias": bias,
            "rope_parameters": {**plain, "partial_rotary_factor": 0.25},
        },
        "qwen3_next": {
            **deltas,
            **experts,
            "layer_types": [*recurrent, "full_attention"],
            "attention_bias": bias,
            "norm_topk_prob": rng.random() < 0.5,
            "moe_intermediate_size": rng.choice([16, 24]),
            "shared_expert_intermediate_size": rng.choice([16, 40]),
            "mlp_only_layers": rng.choice([[], [0], [layers - 1]]),
            "rope_parameters": {**plain, "partial_rotary_factor": 0.25},
        },
        "olmo_hybrid": {
            **no_head_dim,
            **deltas,
            "layer_types": [*recurrent, "full_attention"],
            "linear_allow_neg_eigval": bias,
            "rope_parameters": rng.choice([plain, None]),
        },
        "olmo2": {**no_head_dim, "attention_bias": bias},
        "olmo3": {
            **no_head_dim,
            "layer_types": mixed,
            "sliding_window": window,
            "rope_parameters": {**by_type, "full_attention": YARN},
        },
        "gemma2": {**gemma, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
        "gemma3_text": {**gemma, "rope_parameters": by_type},
        "phi3": {**no_head_dim, **phi},
        "glm": glm,
        "glm4": glm,
        "exaone4": rng.choice(
            [
                {"sliding_window": window, "sliding_window_pattern": 2},
                {"sliding_window": None, "layer_types": ["full_attention"] * layers},
            ]
        ),
        "ernie4_5": {"use_bias": bias},
        "hunyuan_v1_dense": {
            "attention_bias": bias,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0}
            | {"factor": 1.0},
        },
        "seed_oss": {"attention_bias": bias, "attention_out_bias": not bias, "mlp_bias": bias},
    }
    return config | own.get(model_type, {})


def compare(model_type: str, seed: int, backends: list[str], directory: Path) -> None:
    """Compare one model. Raise SystemExit if it differs."""
    rng = random.Random(f"{model_type} {seed}")
    for attempt in range(20):
        values = config_of(model_type, rng)
        config = AutoConfig.for_model(model_type, **values)
        torch.manual_seed(attempt)
        model = AutoModelForCausalLM.from_config(config)
        randomize(model)
        model.save_pretrained(directory)
        if model_type == "olmo_hybrid":
            restore_names(directory)
        model = load(directory)
        ids = [rng.randrange(71) for _ in range(40)]
        try:
            greedy, _ = greedy_tokens(model, ids)
            break
        except Unsuitable:
            continue
    else:
        raise SystemExit(f"{model_type} {seed}: no suitable model")
    wanted = all_logits(model, ids + greedy)
    original = values.get("original_max_position_embeddings")
    for backend in backends:
        llm = LLM(
            str(directory),
            skip_tokenizer_init=True,
            backend=backend,
            max_num_batched_tokens=13,
            max_model_len=256 if original == 32 else 128,
        )
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        [out] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        decoder = llm.llm_engine.engine._runner.decoder  # type: ignore[attr-defined]  # a ModelRunner
        got = logits_of(decoder, ids + greedy)
        noise = np.abs(got - wanted).max() / np.abs(wanted).max()
        is_equal = out.outputs[0].token_ids == greedy
        print(f"{model_type:18} {seed} {backend:6} {noise:.1e} tokens equal: {is_equal}")
        if noise > TOLERANCE or not is_equal:
            raise SystemExit(f"{model_type} differs: {values}")


def logits_of(decoder: Any, ids: list[int]) -> np.ndarray:
    """Return the logits after every token, in chunks of 13 tokens."""
    from mie.load.sizing import cache_shape
    from mie.ops.backend import StepBatch

    cache = decoder.backend.new_kv_cache(cache_shape(decoder.config, 16, 8))
    states, recurrent = None, decoder.config.recurrent
    if recurrent is not None:
        num_layers = decoder.config.layers_recurrent.count(True)
        states = decoder.backend.new_state_cache(recurrent.shape, num_layers, 3)
    table, rows = np.arange(16)[::-1], []
    for start in range(0, len(ids), 13):
        positions = np.arange(start, min(start + 13, len(ids)))
        batch = StepBatch(
            token_ids=np.asarray(ids)[positions],
            positions=positions,
            slot_mapping=table[positions // 8] * 8 + positions % 8,
            cu_seqlens_q=np.array([0, len(positions)]),
            seq_lens=positions[-1:] + 1,
            block_tables=table[None],
            logits_rows=np.arange(len(positions)),
            slots=np.array([1]),
            fresh=np.array([start == 0]),
        )
        rows.append(np.array(decoder.forward(batch, cache, states)))
    return np.concatenate(rows)


def main() -> None:
    """Compare the families named on the command line, or all."""
    types = [family.model_type for family in FAMILIES.values()]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", default=types)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--backends", nargs="+", default=["numpy", "jit"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for model_type in args.model_types:
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                compare(model_type, seed, args.backends, Path(folder))


if __name__ == "__main__":
    main()
