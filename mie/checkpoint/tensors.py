"""List the tensors that a checkpoint must hold, by their Hugging Face names."""

from __future__ import annotations

import math

from mie.checkpoint.config import ModelConfig

Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Return name and shape of every tensor of the model, in the order of the forward pass.

    A matrix is [output features, input features], as ``torch.nn.Linear`` stores it. With tied
    embeddings there is no ``lm_head.weight``: the output matrix is ``model.embed_tokens.weight``.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    of_layer = _layer_tensors(config)
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config.num_layers):
        tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (vocab, hidden)
    return tensors


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights of the model. Tied embeddings count once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def _layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    norms: dict[str, Shape] = {}
    if config.qk_norm:
        norms = {f"self_attn.{x}_norm.weight": (head_dim,) for x in "qk"}
    return {
        "input_layernorm.weight": (hidden,),
        **_linear("self_attn.q_proj", queries, hidden, config.qkv_bias),
        **_linear("self_attn.k_proj", keys, hidden, config.qkv_bias),
        **_linear("self_attn.v_proj", keys, hidden, config.qkv_bias),
        **_linear("self_attn.o_proj", hidden, queries, config.o_bias),
        **norms,
        "post_attention_layernorm.weight": (hidden,),
        **_linear("mlp.gate_proj", inner, hidden, config.mlp_bias),
        **_linear("mlp.up_proj", inner, hidden, config.mlp_bias),
        **_linear("mlp.down_proj", hidden, inner, config.mlp_bias),
    }


def _linear(name: str, rows: int, columns: int, has_bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return {**weight, f"{name}.bias": (rows,)} if has_bias else weight
