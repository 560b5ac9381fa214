"""Make tiny models with recurrent layers, for the engine and for the oracle."""

from pathlib import Path

import numpy as np
from tiny_models import CONFIGS, write_model

from mie.checkpoint.config import model_config_from_hf

HYBRIDS = {name: CONFIGS[name] for name in ("lfm2", "qwen35", "granite4")}
LFM2, QWEN35, GRANITE4 = HYBRIDS.values()

FILE_NAMES = {  # by the names that the oracle knows
    "lfm2": {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "o_proj": "out_proj",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "model.norm": "model.embedding_norm",
    },
    "granitemoehybrid": {
        "mlp.gate_up_proj": "shared_mlp.input_linear",
        "mlp.down_proj": "shared_mlp.output_linear",
    },
}


def random_weights(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 weights by the names that the oracle knows."""
    rng, family = np.random.default_rng(seed), config["model_type"]
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim, weights = config["head_dim"], {}
    queries, keys = (config[f"num_{each}_heads"] * dim for each in ("attention", "key_value"))
    adds_one = family == "qwen3_5_text"

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weights[name + ".weight"] = rng.normal(0, gain / np.sqrt(columns), (rows, columns))

    def vector(name: str, size: int, center: float) -> None:
        weights[name] = rng.normal(center, 0.3, size)

    def conv(name: str, channels: int, width: int) -> None:
        weights[name + ".weight"] = rng.normal(0, 0.6, (channels, 1, width))

    matrix("model.embed_tokens", vocab, hidden, 4.0)
    for layer, kind in enumerate(config["layer_types"]):
        p = f"model.layers.{layer}."
        for norm in ("input", "post_attention"):
            vector(p + norm + "_layernorm.weight", hidden, 0.0 if adds_one else 1.0)
        if kind in ("full_attention", "attention"):
            for part, size in {"q": queries * (1 + adds_one), "k": keys, "v": keys}.items():
                matrix(p + f"self_attn.{part}_proj", size, hidden, 2.0)
            if family != "granitemoehybrid":
                for norm in ("q_norm", "k_norm"):
                    vector(p + f"self_attn.{norm}.weight", dim, 0.0 if adds_one else 1.0)
            matrix(p + "self_attn.o_proj", hidden, queries)
        elif kind == "conv":
            matrix(p + "conv.in_proj", 3 * hidden, hidden, 1.5)
            conv(p + "conv.conv", hidden, config["conv_L_cache"])
            matrix(p + "conv.out_proj", hidden, hidden)
        elif kind == "mamba":
            heads, size = config["mamba_n_heads"], config["mamba_d_state"]
            inner, p = config["mamba_expand"] * hidden, p + "mamba."
            channels = inner + 2 * config["mamba_n_groups"] * size
            matrix(p + "in_proj", inner + channels + heads, hidden, 1.5)
            conv(p + "conv1d", channels, config["mamba_d_conv"])
            vector(p + "conv1d.bias", channels, 0.0)
            for name, center in {"A_log": -0.5, "dt_bias": -1.0, "D": 1.0}.items():
                vector(p + name, heads, center)
            vector(p + "norm.weight", inner, 1.0)
            matrix(p + "out_proj", hidden, inner, 2.0)
        else:
            heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
            inner, p = heads * config["linear_value_head_dim"], p + "linear_attn."
            channels = inner + 2 * groups * config["linear_key_head_dim"]
            sizes = {"qkv": channels, "z": inner, "b": heads, "a": heads}
            for part, size in sizes.items():
                matrix(p + f"in_proj_{part}", size, hidden, 1.5)
            conv(p + "conv1d", channels, config["linear_conv_kernel_dim"])
            for name, center in {"A_log": -0.5, "dt_bias": -1.0}.items():
                vector(p + name, heads, center)
            vector(p + "norm.weight", config["linear_value_head_dim"], 1.0)
            matrix(p + "out_proj", hidden, inner, 2.0)
        p = f"model.layers.{layer}.mlp."
        if family == "granitemoehybrid":
            matrix(p + "gate_up_proj", 2 * mlp, hidden)
        else:
            matrix(p + "gate_proj", mlp, hidden)
            matrix(p + "up_proj", mlp, hidden)
        matrix(p + "down_proj", hidden, mlp)
    vector("model.norm.weight", hidden, 0.0 if adds_one else 1.0)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", vocab, hidden, 3.0)
    return {name: array.astype(np.float32) for name, array in weights.items()}


class TinyHybrid:
    """A model directory, and the same model as the oracle needs it."""

    def __init__(self, directory: Path, config: dict) -> None:
        weights = random_weights(config)
        self.config = config
        self.parsed = model_config_from_hf(config)
        self.weights = {name: array.astype(np.float64) for name, array in weights.items()}
        renamed = {}
        for name, array in weights.items():
            for known, own in FILE_NAMES.get(config["model_type"], {}).items():
                name = name.replace(known, own)
            renamed[name] = array
        self.directory = write_model(directory, config, renamed)
