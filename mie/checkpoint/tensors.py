"""List the tensors that a checkpoint must hold, by their Hugging Face names."""

import math
from collections.abc import Sequence

from mie.model.config import ModelConfig, Names
from mie.model.layers.config import RecurrentConfig

Shape = tuple[int, ...]


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Return name and shape of every tensor of the model, in the order of the forward pass.

    A matrix is [output features, input features], as ``torch.nn.Linear`` stores it. With tied
    embeddings there is no ``lm_head.weight``: the output matrix is ``model.embed_tokens.weight``.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config.num_layers):
        of_layer = _layer_tensors(config, layer)
        tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    tensors[f"model.{config.names.final_norm}.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (vocab, hidden)
    return tensors


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights of the model. Tied embeddings count once."""
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of keys and values of one token in all layers.

    ``itemsize`` is the size of one cache element: 4 bytes for float32, 2 for float16.
    """
    return 2 * config.num_attention_layers * config.num_kv_heads * config.head_dim * itemsize


def _layer_tensors(config: ModelConfig, layer: int) -> dict[str, Shape]:
    hidden, names = config.hidden_size, config.names_of(layer)
    if config.recurrent is not None and config.layers_recurrent[layer]:
        mixer = recurrent_tensors(config.recurrent, hidden)
    else:
        mixer = _attention_tensors(config)
    norms = (names.attention_norm, names.attention_post_norm, names.mlp_norm, names.mlp_post_norm)
    return {
        **mixer,
        **{f"{name}.weight": (hidden,) for name in norms if name is not None},
        **(_mlp(config, names, config.mlp_size(layer)) if config.has_mlp(layer) else {}),
        **(_experts(config) if config.has_experts(layer) else {}),
    }


def _attention_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Return the tensors of attention. Gates are in the matrix of the queries, head by head."""
    hidden, head_dim, names = config.hidden_size, config.head_dim, config.names
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    rows = (2 * queries if config.gates_attention else queries, keys, keys)
    tensors = _parts(names.qkv, rows, hidden, config.qkv_bias)
    tensors |= _linear(names.attention_out, hidden, queries, config.o_bias)
    if names.sinks is not None:
        tensors[names.sinks] = (config.num_heads,)
    if config.qk_norm is not None:
        is_whole = config.qk_norm == "projection"
        tensors[f"{names.q_norm}.weight"] = (queries if is_whole else head_dim,)
        tensors[f"{names.k_norm}.weight"] = (keys if is_whole else head_dim,)
    return tensors


def recurrent_tensors(recurrent: RecurrentConfig, hidden: int) -> dict[str, Shape]:
    """Return the tensors of a recurrence. The heads of Gated DeltaNet share the norm's weights."""
    shape, names = recurrent.shape, recurrent.family
    num_rows: dict[str, int] = {}
    for part in recurrent.projections().values():
        for name, rows in part:
            num_rows[name] = num_rows.get(name, 0) + sum(map(len, rows))
    tensors: dict[str, Shape] = {}
    for name, number in num_rows.items():
        tensors |= _linear(name, number, hidden, recurrent.bias)
    for name, channels in zip(names.conv, recurrent.conv_sizes(names.conv), strict=True):
        tensors[f"{name}.weight"] = (channels, 1, shape.kernel_size)
        if recurrent.conv_bias:
            tensors[f"{name}.bias"] = (channels,)
    for name in recurrent.vectors:
        tensors[names.vectors + name] = (shape.num_heads,)
    if names.norm is not None:
        tensors[f"{names.norm}.weight"] = (
            shape.value_dim if shape.kind == "delta" else shape.width,
        )
    return tensors | _linear(names.out, hidden, shape.width, recurrent.bias)


def _mlp(config: ModelConfig, names: Names, inner: int) -> dict[str, Shape]:
    hidden = config.hidden_size
    return {
        **_parts(names.gate_up, (inner, inner), hidden, config.mlp_bias),
        **_linear(names.down, hidden, inner, config.mlp_bias),
    }


def _experts(config: ModelConfig) -> dict[str, Shape]:
    assert config.experts is not None
    names, hidden, inner = config.names, config.hidden_size, config.experts.size
    has_bias = config.experts.has_biases
    tensors = _linear(names.router, config.experts.number, hidden, has_bias)
    if config.experts.has_router_bias:
        tensors[str(names.router_bias)] = (config.experts.number,)
    if names.shared_gate is not None:
        tensors |= _linear(names.shared_gate, 1, hidden, False)
    for expert in range(config.experts.number):
        gate_up = [name.format(expert) for name in names.expert_gate_up]
        tensors |= _parts(gate_up, (inner, inner), hidden, has_bias)
        tensors |= _linear(names.expert_down.format(expert), hidden, inner, has_bias)
    return tensors


def _parts(
    names: Sequence[str], rows: Sequence[int], columns: int, has_bias: bool
) -> dict[str, Shape]:
    """Return the tensors of matrices with these rows, or of the matrix that holds them all."""
    rows = rows if len(names) > 1 else [sum(rows)]
    tensors: dict[str, Shape] = {}
    for name, num_rows in zip(names, rows, strict=True):
        tensors |= _linear(name, num_rows, columns, has_bias)
    return tensors


def _linear(name: str, num_rows: int, columns: int, has_bias: bool) -> dict[str, Shape]:
    """Return name and shape of the weight of a matrix, and of its bias if it has one."""
    weight: dict[str, Shape] = {f"{name}.weight": (num_rows, columns)}
    return {**weight, f"{name}.bias": (num_rows,)} if has_bias else weight
