"""Compare every family with Hugging Face transformers, on golden models with other sizes and flags.

    pip install '.[bench]' safetensors
    python scripts/compare_families.py [MODEL_TYPE ...] [--seeds 3] [--backends numpy jit]

Each model is one of `golden_cases.json` with random sizes, numbers of heads, windows and flags.
Log-probabilities for 40 tokens and 64 greedy tokens must be within 3e-5 of transformers' (relative
to the largest logit), in chunks of 13 tokens, and greedy tokens must be equal.
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
from make_golden import (
    CASES,
    Case,
    Unsuitable,
    all_logits,
    greedy_tokens,
    load,
    randomize,
    restore_names,
)
from transformers import AutoConfig, AutoModelForCausalLM

from mie import LLM, SamplingParams
from mie.checkpoint.families import FAMILIES

TOLERANCE = 3e-5
CHOICES: dict[str, list[Any]] = {
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "use_bias": [True, False],
    "norm_topk_prob": [True, False],
    "sliding_window": [5, 13, 30],
    "rope_theta": [1e3, 1e4, 5e5],
    "attention_multiplier": [0.1, 0.3],
    "embedding_multiplier": [0.5, 12.0],
    "residual_multiplier": [0.22, 1.5],
    "logits_scaling": [0.5, 2.0],
    "query_pre_attn_scalar": [16, 24],
    "num_experts_per_tok": [1, 2, 3],
    "moe_intermediate_size": [16, 24],
    "conv_L_cache": [2, 3, 4],
    "linear_conv_kernel_dim": [3, 4],
    "linear_value_head_dim": [8, 12],
    "linear_allow_neg_eigval": [True, False],
    "mamba_d_state": [8, 12],
    "mamba_conv_bias": [True, False],
    "mamba_proj_bias": [True, False],
}
"""Other values for keys that a golden model sets."""


def config_of(model_type: str, rng: random.Random) -> dict[str, Any]:
    """Return a golden model of a family with other sizes and flags. They may contradict it."""
    config = {**rng.choice([case for case in CASES if kind(case) == model_type]).config}
    config |= {key: rng.choice(CHOICES[key]) for key in CHOICES.keys() & config.keys()}
    num_kv_heads = rng.choice([1, 2, 3])
    num_heads = num_kv_heads * rng.choice([1, 2, 3])
    return config | {
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_heads,
        "hidden_size": num_heads * (rng.choice([8, 16]) if "head_dim" in config else 16),
        "intermediate_size": rng.choice([40, 64, 72]),
        "tie_word_embeddings": rng.random() < 0.5,
    }


def kind(case: Case) -> str:
    """Return the ``model_type`` of a golden model."""
    return str(case.config_class.model_type)


def compare(model_type: str, seed: int, backends: list[str], directory: Path) -> None:
    """Compare one model. Raise SystemExit if it differs."""
    rng = random.Random(f"{model_type} {seed}")
    for attempt in range(60):
        values = config_of(model_type, rng)
        torch.manual_seed(attempt)
        try:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
            randomize(model)
            model.save_pretrained(directory)
            if model_type == "olmo_hybrid":
                restore_names(directory)
            model = load(directory)
            ids = [rng.randrange(values["vocab_size"]) for _ in range(40)]
            greedy, _ = greedy_tokens(model, ids)
            break
        except (Unsuitable, ValueError, RuntimeError):  # sizes that transformers does not allow
            continue
    else:
        raise SystemExit(f"{model_type} {seed}: no suitable model")
    logits = all_logits(model, ids + greedy)[:-1].astype(np.float64)
    wanted, largest = logits - np.logaddexp.reduce(logits, 1, keepdims=True), np.abs(logits).max()
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
        noise = np.abs(logprobs_of(llm, ids + greedy) - wanted).max() / largest
        is_equal = out.outputs[0].token_ids == greedy
        print(f"{model_type:18} {seed} {backend:6} {noise:.1e} tokens equal: {is_equal}")
        if noise > TOLERANCE or not is_equal:
            raise SystemExit(f"{model_type} differs: {values}")


def logprobs_of(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return the log-probabilities of all tokens after each token but the last, [T - 1, V]."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    [out] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert out.prompt_logprobs is not None
    rows = [row for row in out.prompt_logprobs if row is not None]
    return np.array([[row[token].logprob for token in range(len(row))] for row in rows])


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
