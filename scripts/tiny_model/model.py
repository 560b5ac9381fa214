"""The bundled model in PyTorch, and its optimizers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Config:
    """The model's shape, with the names of the Hugging Face configuration."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Scales rows to unit mean square, in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def rope_table(config: Config) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, head_dim] for `rotate` (Su et al., 2021)."""
    half = torch.arange(0, config.head_dim, 2) / config.head_dim
    positions = torch.arange(config.max_position_embeddings)
    angles = torch.outer(positions, config.rope_theta**-half).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x [B, heads, T, head_dim], with the halves as the pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention. Each key and value head serves a group of query heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """The SwiGLU feed-forward layer (Shazeer, 2020)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama decoder whose output weights are its embeddings."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rope_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights(config)

    def _init_weights(self, config: Config) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = math.sqrt(2 * config.num_hidden_layers) if into_residual else 1.0
                nn.init.normal_(weight, std=0.02 / scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states [B, T, hidden] of tokens [B, T]."""
        length = tokens.shape[1]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab] of hidden states [..., hidden]."""
        return F.linear(hidden, self.embed_tokens.weight)


# -- optimizers ------------------------------------------------------------------------------------


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices [N, rows, columns] with all singular values near one.

    Five Newton-Schulz steps with the coefficients of Muon (Jordan, 2024).
    """
    wide = matrices.shape[1] <= matrices.shape[2]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Muon (Jordan, 2024) with Nesterov momentum, in the dtype of the weights.

    `torch.optim.Muon` computes in bfloat16, which is slow on a CPU without such instructions.
    Matrices of one shape are updated together, which is faster on a GPU.
    """

    def __init__(self, matrices: list[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        shapes = {p.shape for p in matrices}
        groups = [{"params": [p for p in matrices if p.shape == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the matrices."""
        for group in self.param_groups:
            params = group["params"]
            gradient = torch.stack([p.grad for p in params])
            state = self.state[params[0]]
            momentum = state.setdefault("momentum", torch.zeros_like(gradient))
            momentum.lerp_(gradient, 0.05)
            updates = orthogonal(gradient.lerp(momentum, 0.95))
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            # The factor gives the update the usual size of one by AdamW.
            scale = -0.2 * group["lr"] * math.sqrt(max(gradient.shape[1:]))
            torch._foreach_add_(params, list(updates.unbind()), alpha=scale)


def make_optimizers(model: Llama, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the embeddings and norms."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    embeddings = [model.embed_tokens.weight]
    muon = Muon(matrices, lr=rate, weight_decay=0.05)
    adam = torch.optim.AdamW(embeddings + norms, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = rate
    return [muon, adam]
