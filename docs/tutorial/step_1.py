"""Step 1: one sequence, no cache."""

import json
import re
from pathlib import Path

import numpy as np
import safetensors

FOLDER = Path(__file__).parents[2] / "mie/assets/tiny"


def load(folder=FOLDER):
    """Return the bundled model, with its weights as float64."""
    config = json.loads((folder / "config.json").read_text())
    weights = {}
    for name, tensor in safetensors.deserialize((folder / "model.safetensors").read_bytes()):
        half = np.frombuffer(tensor["data"], np.uint16)  # bfloat16: the upper half of a float32
        full = (half.astype(np.uint32) << 16).view(np.float32)
        weights[name] = full.reshape(tensor["shape"]).astype(np.float64)
    return Model(config, weights)


def encode(text, folder=FOLDER):
    """Return the ids of a text whose words are one token each."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = re.findall(r" ?\w+|\W", text)
    return [vocab["<|bos|>"], *(vocab[word.replace(" ", "Ġ")] for word in words)]


def decode(ids, folder=FOLDER):
    """Return the text of some ids."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = {token: word for word, token in vocab.items()}
    text = "".join(words[token] for token in ids if token > 4)  # the first are special tokens
    return text.replace("Ġ", " ").replace("Ċ", "\n")


def attention(q, k, v):
    """Return what each query reads from the keys up to its own position.

    q is [n, heads, dim]; k and v are [s, kv_heads, dim]. The queries are the last n of s tokens.
    """
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    n, s = len(q), len(k)
    visible = np.arange(s) <= np.arange(s - n, s)[:, None]
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(np.where(visible, scores - scores.max(), -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


class Model:
    """A Llama: token ids and their positions in, logits out."""

    def __init__(self, config, weights):
        self.config, self.weights = config, weights

    def norm(self, x, name):
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.weights[name + ".weight"]

    def linear(self, x, name):
        return x @ self.weights[name + ".weight"].T

    def heads(self, x, name):
        return self.linear(x, name).reshape(len(x), -1, self.config["head_dim"])

    def rotate(self, x, positions):
        dim = self.config["head_dim"]
        frequency = self.config["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
        angle = np.tile(np.outer(positions, frequency), 2)[:, None]
        left, right = np.split(x, 2, axis=-1)
        return x * np.cos(angle) + np.concatenate([-right, left], -1) * np.sin(angle)

    def forward(self, tokens, positions, attend):
        """Return logits [T, V]; attend(layer, q, k, v) decides which keys a query sees."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            h = self.norm(x, p + "input_layernorm")
            q = self.rotate(self.heads(h, p + "self_attn.q_proj"), positions)
            k = self.rotate(self.heads(h, p + "self_attn.k_proj"), positions)
            v = self.heads(h, p + "self_attn.v_proj")
            attended = attend(layer, q, k, v).reshape(len(x), -1)
            x = x + self.linear(attended, p + "self_attn.o_proj")
            h = self.norm(x, p + "post_attention_layernorm")
            gate, up = self.linear(h, p + "mlp.gate_proj"), self.linear(h, p + "mlp.up_proj")
            x = x + self.linear(gate / (1 + np.exp(-gate)) * up, p + "mlp.down_proj")
        x = self.norm(x, "model.norm")
        tied = self.weights["model.embed_tokens.weight"]
        return x @ self.weights.get("lm_head.weight", tied).T


def generate(model, prompt, count):
    """Return the prompt and ``count`` more tokens, always the most likely one."""
    tokens = list(prompt)

    def attend(layer, q, k, v):
        return attention(q, k, v)

    for _ in range(count):
        logits = model.forward(tokens, range(len(tokens)), attend)
        tokens.append(int(logits[-1].argmax()))
    return tokens


if __name__ == "__main__":
    print(decode(generate(load(), encode("Once there was a fox named Ruby"), 24)))
