"""Read the sizes of layers that keep a state, and list their tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mie.checkpoint.family import Family, Recurrent
from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.refusals import activation_name
from mie.checkpoint.size_limits import MAX_EPS, MAX_WIDTH, MIN_EPS
from mie.errors import UnsupportedModelError, shown
from mie.ops.recurrent_shape import Kind, RecurrentShape

RECURRENT = "recurrent"
"""The type of these layers, whatever the family calls it."""

MAX_KERNEL = 64
SILU = ("silu", "swish")
INFINITIES = (math.inf, {"__float__": "Infinity"})  # as JSON, and as transformers 5 writes it

Selection = tuple[str, Sequence[range]]
"""The name of a matrix, and some of its rows."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """The sizes, flags and names of a model's recurrent layers."""

    shape: RecurrentShape
    family: Recurrent
    conv_bias: bool
    bias: bool  # of the projections
    largest_beta: float  # of the gated delta rule
    norm_eps: float

    @property
    def norm_size(self) -> int:
        """The channels of the result that are normalised together."""
        shape = self.shape
        is_mamba = shape.kind == "mamba"
        return shape.width // shape.num_groups if is_mamba else shape.value_dim

    @property
    def num_norm_weights(self) -> int:
        """The weights of the norm of the result, which Gated DeltaNet's heads share."""
        return self.shape.value_dim if self.shape.kind == "delta" else self.shape.width

    def projections(self) -> Mapping[str, Sequence[Selection]]:
        """Return the rows of matrices that give "mixed", "gate" and "small", each in its order."""
        shape, names = self.shape, self.family
        width, heads, groups = shape.width, shape.num_heads, shape.num_groups
        if names.layout == "joined":
            gate, mixed, small = _cut([width, shape.num_channels, heads])
            [name] = names.mixed
            return {"mixed": [(name, mixed)], "gate": [(name, gate)], "small": [(name, small)]}
        if names.layout == "by group":
            [name], [other] = names.mixed, names.small
            values = width // groups
            q, k, v, z = _cut([shape.key_dim, shape.key_dim, values, values], groups)
            b, a = _cut([heads // groups] * 2, groups)
            return {
                "mixed": [(name, [*q, *k, *v])],
                "gate": [(name, z)],
                "small": [(other, [*b, *a])],
            }
        sizes = [3 * width] if shape.kind == "conv" else self._sizes(names.mixed)
        wanted = (("mixed", names.mixed, sizes), ("gate", names.gate, [width]))
        return {
            part: [(name, [range(size)]) for name, size in zip(own, sizes, strict=True)]
            for part, own, sizes in (*wanted, ("small", names.small, [heads] * len(names.small)))
            if own
        }

    def _sizes(self, names: Sequence[str]) -> list[int]:
        """Return the channels that each of these tensors has: all, or its part of q, k and v."""
        keys = self.shape.num_groups * self.shape.key_dim
        return [keys, keys, self.shape.width] if len(names) > 1 else [self.shape.num_channels]

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a layer with ``hidden`` inputs, but for its norms and its MLP."""
        shape, names, heads = self.shape, self.family, self.shape.num_heads
        num_rows: dict[str, int] = {}
        for part in self.projections().values():
            for name, rows in part:
                num_rows[name] = num_rows.get(name, 0) + sum(map(len, rows))
        tensors: dict[str, tuple[int, ...]] = {}
        for name, number in num_rows.items():
            tensors |= linear_tensors(name, number, hidden, self.bias)
        for name, channels in zip(names.conv, self._sizes(names.conv), strict=True):
            tensors[f"{name}.weight"] = (channels, 1, shape.kernel_size)
            if self.conv_bias:
                tensors[f"{name}.bias"] = (channels,)
        for name in self.vectors:
            tensors[names.vectors + name] = (heads,)
        if names.norm is not None:
            tensors[f"{names.norm}.weight"] = (self.num_norm_weights,)
        return tensors | linear_tensors(names.out, hidden, shape.width, self.bias)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the vectors with a number for each head."""
        of_kind = {"conv": (), "delta": ("A_log", "dt_bias"), "mamba": ("A_log", "dt_bias", "D")}
        return of_kind[self.shape.kind]


def linear_tensors(
    name: str, num_rows: int, columns: int, has_bias: bool
) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the weight of a matrix, and of its bias if it has one."""
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (num_rows, columns)}
    return {**weight, f"{name}.bias": (num_rows,)} if has_bias else weight


def _cut(sizes: Sequence[int], num_groups: int = 1) -> list[list[range]]:
    """Return the rows of each part of a matrix with parts of these sizes in every group."""
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    begins = range(0, num_groups * sum(sizes), sum(sizes))
    return [
        [range(begin + start, begin + start + size) for begin in begins]
        for start, size in zip(starts, sizes, strict=True)
    ]


def read_recurrent(reader: JsonReader, family: Family, hidden_size: int) -> RecurrentConfig | None:
    """Return the sizes of the recurrent layers, or None in a family without any.

    Raises:
        UnsupportedModelError: the layers have a feature that is not implemented.
        ModelError: a size is missing or contradicts another.
    """
    if family.recurrent is None:
        return None
    if (name := activation_name(reader.values)) not in SILU:
        raise UnsupportedModelError(
            f"{reader.source}: activation {shown(name)} of recurrent layers is not supported "
            f"(supported: {SILU[0]!r})"
        )
    kind, eps = family.recurrent.kind, family.recurrent.norm_eps
    bias = {"conv": "conv_bias", "delta": None, "mamba": "mamba_proj_bias"}[kind]
    conv_bias = {"conv": "conv_bias", "delta": None, "mamba": "mamba_conv_bias"}[kind]
    is_doubled = reader.flag("linear_allow_neg_eigval", default=False)
    return RecurrentConfig(
        shape=_SHAPES[kind](reader, hidden_size),
        family=family.recurrent,
        conv_bias=conv_bias is not None and reader.flag(conv_bias, default=False),
        bias=bias is not None and reader.flag(bias, default=False),
        largest_beta=2.0 if is_doubled else 1.0,
        norm_eps=eps or reader.number("rms_norm_eps", default=1e-6, low=MIN_EPS, high=MAX_EPS),
    )


def _conv_shape(reader: JsonReader, hidden_size: int) -> RecurrentShape:
    return RecurrentShape(
        kind="conv",
        kernel_size=reader.integer("conv_L_cache", maximum=MAX_KERNEL),
        num_groups=0,
        num_heads=1,
        key_dim=0,
        value_dim=hidden_size,
    )


def _delta_shape(reader: JsonReader, hidden_size: int) -> RecurrentShape:
    default = reader.integer("num_attention_heads", maximum=MAX_WIDTH)  # OLMo's
    groups = reader.integer("linear_num_key_heads", default=default, maximum=MAX_WIDTH)
    heads = reader.integer("linear_num_value_heads", default=default, maximum=MAX_WIDTH)
    if heads % groups:
        raise reader.error(
            "linear_num_value_heads",
            f"must be a multiple of linear_num_key_heads ({groups})",
            heads,
        )
    default = int(0.75 * hidden_size / groups)
    key_dim = reader.integer("linear_key_head_dim", default=default, maximum=MAX_WIDTH)
    value_dim = reader.integer("linear_value_head_dim", default=2 * key_dim, maximum=MAX_WIDTH)
    return RecurrentShape(
        kind="delta",
        kernel_size=reader.integer("linear_conv_kernel_dim", maximum=MAX_KERNEL),
        num_groups=groups,
        num_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def _mamba_shape(reader: JsonReader, hidden_size: int) -> RecurrentShape:
    limits = reader.values.get("time_step_limit")
    if limits not in (None, *([0, each] for each in INFINITIES)):
        raise UnsupportedModelError(
            f"{reader.source}: time_step_limit {shown(limits)} is not supported (supported: none)"
        )
    heads = reader.integer("mamba_n_heads", maximum=MAX_WIDTH)
    groups = reader.integer("mamba_n_groups", maximum=MAX_WIDTH)
    width = reader.integer("mamba_expand", maximum=MAX_KERNEL) * hidden_size
    head_dim = reader.values.get("mamba_d_head")
    if head_dim == "auto":
        head_dim = width // heads
    if not isinstance(head_dim, int) or heads * head_dim != width or heads % groups:
        raise reader.error(
            "mamba_n_heads",
            f"must be a multiple of mamba_n_groups ({groups}), and times mamba_d_head be {width}",
            heads,
        )
    return RecurrentShape(
        kind="mamba",
        kernel_size=reader.integer("mamba_d_conv", maximum=MAX_KERNEL),
        num_groups=groups,
        num_heads=heads,
        key_dim=reader.integer("mamba_d_state", maximum=MAX_WIDTH),
        value_dim=head_dim,
    )


_SHAPES: Mapping[Kind, Callable[[JsonReader, int], RecurrentShape]] = {
    "conv": _conv_shape,
    "delta": _delta_shape,
    "mamba": _mamba_shape,
}


def recurrent_layers(reader: JsonReader, family: Recurrent, num_layers: int) -> tuple[bool, ...]:
    """Return which layers are recurrent if ``layer_types`` does not say."""
    if family.kind == "conv":
        listed = reader.values.get("full_attn_idxs")
        attend = range(num_layers) if listed is None else reader.token_ids("full_attn_idxs")
        return tuple(layer not in attend for layer in range(num_layers))
    if family.kind == "mamba":
        return (True,) * num_layers
    interval = reader.integer("full_attention_interval", maximum=MAX_WIDTH)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
