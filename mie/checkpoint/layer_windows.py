"""Read the sliding window of each layer from a ``config.json``."""

from __future__ import annotations

from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.size_limits import MAX_CONTEXT, MAX_WIDTH
from mie.errors import ModelError, UnsupportedModelError


def read_layer_windows(
    reader: JsonReader, architecture: str, num_layers: int
) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, by the rules of its family."""
    window = _sliding_window(reader, architecture)
    rule = _default_layer_types(reader, architecture, window, num_layers)
    layer_types = reader.texts("layer_types") or rule
    if len(layer_types) != num_layers:
        raise reader.error(
            "layer_types", f"must name num_hidden_layers ({num_layers}) layers", len(layer_types)
        )
    if layer_types != rule and not architecture.startswith("Qwen"):
        # transformers ignores the key in these families, so the author's intention is unclear.
        raise UnsupportedModelError(
            f"{reader.source}: layer_types that differ from layer to layer are not supported in "
            f"{architecture}; supported in Qwen2ForCausalLM, Qwen3ForCausalLM"
        )
    if window is None and "sliding_attention" in layer_types:
        raise ModelError(
            f"{reader.source}: layer_types asks for sliding_attention, but sliding_window is null "
            "or use_sliding_window is false; set both, or name those layers full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _sliding_window(reader: JsonReader, architecture: str) -> int | None:
    if architecture == "LlamaForCausalLM":
        return None
    window = reader.optional_integer("sliding_window", maximum=MAX_CONTEXT)
    if architecture == "MistralForCausalLM":
        return window
    return window if reader.flag("use_sliding_window", default=False) else None


def _default_layer_types(
    reader: JsonReader, architecture: str, window: int | None, num_layers: int
) -> tuple[str, ...]:
    """Return Mistral's default (all layers slide) or Qwen's (from ``max_window_layers`` on)."""
    if window is None:
        first_sliding = num_layers
    elif architecture == "MistralForCausalLM":
        first_sliding = 0
    else:
        first_sliding = reader.integer("max_window_layers", minimum=0, maximum=MAX_WIDTH)
    return tuple(
        "full_attention" if layer < first_sliding else "sliding_attention"
        for layer in range(num_layers)
    )
