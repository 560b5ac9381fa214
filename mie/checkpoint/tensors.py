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
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {prefix + name: shape for name, shape in _layer_tensors(config).items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (vocab, hidden)
    return tensors


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights of the model. Tied embeddings count once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def _layer_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    return {
        "input_layernorm.weight": (hidden,),
        **_attention_tensors(config),
        "post_attention_layernorm.weight": (hidden,),
        **_mlp_tensors(config),
    }


def _attention_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    tensors: dict[str, Shape] = {
        **_linear("self_attn.q_proj", queries, hidden, bias=config.qkv_bias),
        **_linear("self_attn.k_proj", keys, hidden, bias=config.qkv_bias),
        **_linear("self_attn.v_proj", keys, hidden, bias=config.qkv_bias),
        **_linear("self_attn.o_proj", hidden, queries, bias=config.o_bias),
    }
    if config.qk_norm:
        tensors["self_attn.q_norm.weight"] = (head_dim,)
        tensors["self_attn.k_norm.weight"] = (head_dim,)
    return tensors


def _mlp_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return {
        **_linear("mlp.gate_proj", intermediate, hidden, bias=config.mlp_bias),
        **_linear("mlp.up_proj", intermediate, hidden, bias=config.mlp_bias),
        **_linear("mlp.down_proj", hidden, intermediate, bias=config.mlp_bias),
    }


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    if bias:
        tensors[f"{name}.bias"] = (rows,)
    return tensors
