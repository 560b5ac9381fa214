"""Make model directories with random weights, small enough to run thousands of times."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

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


def random_weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 weights by their Hugging Face names, scaled so that logits are well apart."""
    rng = np.random.default_rng(seed)
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    weights = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weights[name] = rng.normal(0, gain / np.sqrt(columns), (rows, columns))

    def vector(name: str, size: int, center: float = 1.0) -> None:
        weights[name] = rng.normal(center, 0.2, size)

    matrix("model.embed_tokens.weight", vocab, hidden, 4.0)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        vector(p + "input_layernorm.weight", hidden)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            matrix(p + f"self_attn.{name}_proj.weight", size, hidden, 2.0)
            if config["model_type"] == "qwen2":
                vector(p + f"self_attn.{name}_proj.bias", size, 0.0)
        if config["model_type"] == "qwen3":
            vector(p + "self_attn.q_norm.weight", config["head_dim"])
            vector(p + "self_attn.k_norm.weight", config["head_dim"])
        matrix(p + "self_attn.o_proj.weight", hidden, q_size)
        vector(p + "post_attention_layernorm.weight", hidden)
        matrix(p + "mlp.gate_proj.weight", mlp, hidden)
        matrix(p + "mlp.up_proj.weight", mlp, hidden)
        matrix(p + "mlp.down_proj.weight", hidden, mlp)
    vector("model.norm.weight", hidden)
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
}


class TinyModel:
    """A model directory, and the same model as the oracle needs it."""

    def __init__(self, directory: Path, config: dict) -> None:
        weights = random_weights(config)
        self.config = config
        self.weights = {name: array.astype(np.float64) for name, array in weights.items()}
        self.directory = write_model(directory, config, weights)
