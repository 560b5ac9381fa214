"""Find the layers of a model with full attention, with a window, and with a state."""

from mie.checkpoint.families import FAMILIES
from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.recurrent import RECURRENT, recurrent_layers
from mie.checkpoint.size_limits import MAX_WIDTH
from mie.errors import ModelError, UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"
_IN_ALL_LAYERS = ("none", "all", "all switched")


def layer_kinds(reader: JsonReader, architecture: str, num_layers: int) -> tuple[str, ...]:
    """Return the type of each layer, by ``layer_types`` or by the rule of its family."""
    windows = FAMILIES[architecture].windows
    has_window = reader.values.get("sliding_window") is not None and windows != "none"
    if windows in ("switched", "all switched"):
        has_window = has_window and reader.flag("use_sliding_window", default=False)
    recurrent = FAMILIES[architecture].recurrent
    names = {
        "attention": FULL,
        **dict.fromkeys(recurrent.layer_types if recurrent else (), RECURRENT),
    }
    layer_types = tuple(names.get(kind, kind) for kind in reader.texts("layer_types"))
    if not layer_types and has_window:
        layer_types = _rule(reader, windows, num_layers)
    if not layer_types and recurrent:
        are = recurrent_layers(reader, recurrent, num_layers)
        layer_types = tuple(RECURRENT if is_recurrent else FULL for is_recurrent in are)
    layer_types = layer_types or (FULL,) * num_layers
    if len(layer_types) != num_layers:
        raise reader.error(
            "layer_types", f"must name num_hidden_layers ({num_layers}) layers", len(layer_types)
        )
    if recurrent and FULL not in layer_types:
        raise UnsupportedModelError(
            f"{reader.source}: models without any attention layer are not supported"
        )
    attends = {kind for kind in layer_types if kind != RECURRENT}
    if windows in _IN_ALL_LAYERS and attends != {SLIDING if has_window else FULL}:
        # transformers ignores the key in these families, so the author's intention is unclear.
        supported = [n for n, each in FAMILIES.items() if each.windows not in _IN_ALL_LAYERS]
        raise UnsupportedModelError(
            f"{reader.source}: layer_types that differ from layer to layer are not supported in "
            f"{architecture}; supported in {', '.join(supported)}"
        )
    if not has_window and SLIDING in layer_types:
        raise ModelError(
            f"{reader.source}: layer_types asks for sliding_attention, but sliding_window is null "
            "or use_sliding_window is false; set both, or name those layers full_attention"
        )
    return layer_types


def _rule(reader: JsonReader, windows: str, num_layers: int) -> tuple[str, ...]:
    """Return the types of layers of a family with windows if the file names none."""
    if windows == "switched":
        first = reader.integer("max_window_layers", minimum=0, maximum=MAX_WIDTH)
        return tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    if windows in _IN_ALL_LAYERS or reader.values.get("sliding_window_pattern") is None:
        return (SLIDING,) * num_layers
    pattern = reader.values["sliding_window_pattern"]  # EXAONE 4 writes "LLLG" for 4
    every = len(pattern) if isinstance(pattern, str) else None
    every = every or reader.integer("sliding_window_pattern", maximum=MAX_WIDTH)
    return tuple(SLIDING if (layer + 1) % every else FULL for layer in range(num_layers))
