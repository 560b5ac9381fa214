"""Make model directories with random weights, small enough to run thousands of times."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mie.checkpoint.config import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 3,
}
MISTRAL_WINDOW = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_key_value_heads": 1,
    "sliding_window": 5,
}
QWEN3_TIED = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}

SMOLLM3 = LLAMA | {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "no_rope_layers": [1, 0],
}
GRANITE = LLAMA | {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "tie_word_embeddings": True,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.8,
}
OLMO3 = LLAMA | {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
        "full_attention": {"rope_theta": 5000.0, "rope_type": "default"},
    },
}
GEMMA2 = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 9.0,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
GEMMA3 = {
    key: value
    for key, value in (OLMO3 | GEMMA2).items()
    if key not in ("attn_logit_softcapping", "final_logit_softcapping")
} | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
PHI3 = LLAMA | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "original_max_position_embeddings": 256,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "rope_type": "longrope",
        "partial_rotary_factor": 0.5,
        "attention_factor": 1.2,
        "short_factor": [1.1, 1.3],
        "long_factor": [2.0, 3.0],
    },
}
GLM4 = LLAMA | {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "attention_bias": True,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
GLM = GLM4 | {"architectures": ["GlmForCausalLM"], "model_type": "glm"}
EXAONE4 = LLAMA | {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
ERNIE = LLAMA | {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5"}
HUNYUAN = LLAMA | {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "model_type": "hunyuan_v1_dense",
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 20.0},
}

QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
OLMOE = LLAMA | {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "intermediate_size": 12,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "tie_word_embeddings": True,
}

GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def random_weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 weights by their Hugging Face names, scaled so that logits are well apart."""
    rng = np.random.default_rng(seed)
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    family, weights = config["model_type"], {}
    norms = {
        "olmo3": ("post_attention", "post_feedforward"),
        "exaone4": ("post_attention", "post_feedforward"),
        "glm4": ("input", "post_attention", "post_self_attn", "post_mlp"),
        "gemma2": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
        "gemma3_text": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    }.get(family, ("input", "post_attention"))
    head_norms = {
        "qwen3": {"q_norm": config["head_dim"], "k_norm": config["head_dim"]},
        "olmo3": {"q_norm": q_size, "k_norm": kv_size},
        "hunyuan_v1_dense": dict.fromkeys(("query_layernorm", "key_layernorm"), config["head_dim"]),
    }
    for same in ("gemma3_text", "exaone4", "qwen3_moe"):
        head_norms[same] = head_norms["qwen3"]
    head_norms["olmoe"] = head_norms["olmo3"]

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weights[name] = rng.normal(0, gain / np.sqrt(columns), (rows, columns))

    def vector(name: str, size: int, center: float = 1.0) -> None:
        weights[name] = rng.normal(center, 0.2, size)

    def norm(name: str, size: int) -> None:
        vector(name + ".weight", size, 0.0 if family.startswith("gemma") else 1.0)

    matrix("model.embed_tokens.weight", vocab, hidden, 4.0)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        for name in norms:
            norm(p + name + "_layernorm", hidden)
        for name, size in head_norms.get(family, {}).items():
            norm(p + "self_attn." + name, size)
        parts = {"q": q_size, "k": kv_size, "v": kv_size}
        if family == "phi3":
            parts = {"qkv": q_size + 2 * kv_size}
        for name, size in parts.items():
            matrix(p + f"self_attn.{name}_proj.weight", size, hidden, 2.0)
            if family in ("qwen2", "glm", "glm4", "gpt_oss"):
                vector(p + f"self_attn.{name}_proj.bias", size, 0.0)
        matrix(p + "self_attn.o_proj.weight", hidden, q_size)
        if family == "gpt_oss":
            vector(p + "self_attn.o_proj.bias", hidden, 0.0)
            vector(p + "self_attn.sinks", config["num_attention_heads"], 0.5)
            number, q = config["num_local_experts"], p + "mlp.experts."
            matrix(p + "mlp.router.weight", number, hidden, 2.0)
            vector(p + "mlp.router.bias", number, 0.0)
            for name, rows, columns in (
                ("gate_up_proj", hidden, 2 * mlp),
                ("down_proj", mlp, hidden),
            ):
                stack = rng.normal(0, 1 / np.sqrt(rows), (number, rows, columns))
                weights[q + name] = 2 * stack
                weights[q + name + "_bias"] = rng.normal(0, 0.3, (number, columns))
            continue
        if "num_experts" in config:
            matrix(p + "mlp.gate.weight", config["num_experts"], hidden, 2.0)
            inner = config.get("moe_intermediate_size", mlp)
            for expert in range(config["num_experts"]):
                q = p + f"mlp.experts.{expert}."
                matrix(q + "gate_proj.weight", inner, hidden)
                matrix(q + "up_proj.weight", inner, hidden)
                matrix(q + "down_proj.weight", hidden, inner)
            continue
        if family in ("phi3", "glm", "glm4"):
            matrix(p + "mlp.gate_up_proj.weight", 2 * mlp, hidden)
        else:
            matrix(p + "mlp.gate_proj.weight", mlp, hidden)
            matrix(p + "mlp.up_proj.weight", mlp, hidden)
        matrix(p + "mlp.down_proj.weight", hidden, mlp)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", vocab, hidden, 3.0)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def write_model(directory: Path, config: dict, weights: dict[str, np.ndarray]) -> Path:
    """Write a model directory without a tokenizer, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")
    return directory


TINY = {
    "llama": LLAMA,
    "mistral_window": MISTRAL_WINDOW,
    "qwen2": QWEN2,
    "qwen3_tied": QWEN3_TIED,
    "smollm3": SMOLLM3,
    "granite": GRANITE,
    "olmo3": OLMO3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "glm4": GLM4,
    "exaone4": EXAONE4,
    "ernie": ERNIE,
    "hunyuan": HUNYUAN,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "gpt_oss": GPT_OSS,
}


class TinyModel:
    """A model directory, and the same model as the oracle needs it."""

    def __init__(self, directory: Path, config: dict) -> None:
        weights = random_weights(config)
        self.config = config
        self.parsed = ModelConfig.from_hf(config)
        self.weights = {name: array.astype(np.float64) for name, array in weights.items()}
        self.directory = write_model(directory, config, weights)
