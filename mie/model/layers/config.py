"""Hold the configuration of recurrent layers, of experts, and of quantised files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mie.model.config import Names
from mie.ops.layers.recurrent_shape import Kind, RecurrentShape

ExpertActivation = Literal["silu", "clamped_silu"]

Selection = tuple[str, Sequence[range]]
"""The name of a matrix, and some of its rows."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of sparse layers. A router chooses some experts for each token."""

    number: int
    num_chosen: int
    size: int
    """The intermediate size of an expert."""
    activation: ExpertActivation
    has_biases: bool
    """Whether experts and their router have biases."""
    is_normalised: bool
    """Whether the weights of a token's experts sum to 1."""
    has_router_bias: bool
    """Whether the file has `Names.router_bias`."""
    layers: tuple[bool, ...]
    """Whether each layer is sparse."""
    are_beside_mlp: bool
    """Whether sparse layers also have an MLP for all tokens."""
    dense_size: int
    """The intermediate size of the MLP in layers that are not sparse, or 0 without such layers."""


@dataclass(frozen=True, kw_only=True)
class RecurrentLayers:
    """A kind of layers that keep a state, and the names of their tensors.

    A matrix that is named more than once holds the rows of several parts, in the order of `layout`.
    """

    kind: Kind
    layer_types: tuple[str, ...]
    """The names of such layers in ``layer_types``."""
    mixed: tuple[str, ...]
    """Matrices that give the inputs of the convolution."""
    conv: tuple[str, ...]
    """One convolution, or three for queries, keys and values."""
    out: str
    gate: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    """Matrices with one output a head: b and a of the gated delta rule, dt of Mamba 2."""
    vectors: str = ""
    """The prefix of ``A_log``, ``dt_bias`` and ``D``."""
    norm: str | None = None
    """The norm of the result."""
    layout: Literal["separate", "joined", "by group"] = "separate"
    """Whether a matrix holds several parts.

    "joined" is gate, mixed and small in one. "by group" is mixed and gate in one, b and a in
    another, both with the rows of a key head together.
    """
    norm_eps: float | None = None
    """The epsilon of `norm`, if it is not the model's."""
    names: Names | None = None
    """The other tensors of such a layer, if they are not named as in attention layers."""


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """The sizes, flags and names of a model's recurrent layers."""

    shape: RecurrentShape
    family: RecurrentLayers
    conv_bias: bool
    bias: bool
    """Whether projections have biases."""
    largest_beta: float
    """The factor of beta in the gated delta rule."""
    norm_eps: float

    @property
    def norm_size(self) -> int:
        """The channels of the result that are normalised together."""
        shape = self.shape
        is_mamba = shape.kind == "mamba"
        return shape.width // shape.num_groups if is_mamba else shape.value_dim

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the vectors with a number for each head."""
        of_kind = {"conv": (), "delta": ("A_log", "dt_bias"), "mamba": ("A_log", "dt_bias", "D")}
        return of_kind[self.shape.kind]

    def conv_sizes(self, names: Sequence[str]) -> list[int]:
        """Return the channels of each of these tensors: all, or the parts of q, k and v."""
        keys = self.shape.num_groups * self.shape.key_dim
        return [keys, keys, self.shape.width] if len(names) > 1 else [self.shape.num_channels]

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
        sizes = [3 * width] if shape.kind == "conv" else self.conv_sizes(names.mixed)
        wanted = (("mixed", names.mixed, sizes), ("gate", names.gate, [width]))
        return {
            part: [(name, [range(size)]) for name, size in zip(own, sizes, strict=True)]
            for part, own, sizes in (*wanted, ("small", names.small, [heads] * len(names.small)))
            if own
        }


def _cut(sizes: Sequence[int], num_groups: int = 1) -> list[list[range]]:
    """Return the rows of each part of a matrix with parts of these sizes in every group."""
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    begins = range(0, num_groups * sum(sizes), sum(sizes))
    return [
        [range(begin + start, begin + start + size) for begin in begins]
        for start, size in zip(starts, sizes, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the files hold a quantised matrix."""

    format: str
    """A format of compressed-tensors, or "gptq", "gptq_v2", "awq" or "mxfp4"."""
    bits: int
    group: int | None
    """Inputs that share a scale. None: all inputs."""
    symmetric: bool
    """Whether there are no zero points."""


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """The modules that are quantised in the files, and their forms."""

    method: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    """The targets of each scheme."""
    ignore: tuple[str, ...] = ()
