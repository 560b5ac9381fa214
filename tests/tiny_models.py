"""Make model directories with random weights, small enough to run thousands of times."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mie.checkpoint.config import model_config_from_hf

ROWS = json.loads((Path(__file__).parent / "data/tiny_models.json").read_text(encoding="utf-8"))
CONFIGS = {name: ROWS["llama"] | row for name, row in ROWS.items()}
"""The configurations by name. A row of the file has the differences from a Llama."""

LLAMA, GLM = CONFIGS["llama"], CONFIGS["glm"]
MISTRAL_WINDOW, QWEN2, QWEN3_TIED = (CONFIGS[x] for x in ("mistral_window", "qwen2", "qwen3_tied"))
GEMMA3, ERNIE, GPT_OSS = (CONFIGS[name] for name in ("gemma3", "ernie", "gpt_oss"))
QWEN3_MOE, OLMOE = CONFIGS["qwen3_moe"], CONFIGS["olmoe"]


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


OTHERS = ("glm", "lfm2", "qwen35", "granite4")
TINY = {name: config for name, config in CONFIGS.items() if name not in OTHERS}
"""The models that have no recurrent layers, a family each."""


class TinyModel:
    """A model directory, and the same model as the oracle needs it."""

    def __init__(self, directory: Path, config: dict) -> None:
        weights = random_weights(config)
        self.config = config
        self.parsed = model_config_from_hf(config)
        self.weights = {name: array.astype(np.float64) for name, array in weights.items()}
        self.directory = write_model(directory, config, weights)
