"""Mix the tokens of sequences by a recurrence with a state, and load such layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from mie.base.arithmetic import exp
from mie.model.config import Names
from mie.model.layers.config import RecurrentConfig
from mie.model.mixers import Caches, Mixer
from mie.ops.backend import Array, Backend, StepBatch

if TYPE_CHECKING:
    from mie.model.weights import Loader


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence(Mixer):
    """A short convolution, or a convolution and a recurrence with a gated result."""

    index: int
    """Number of the layer among the recurrent layers."""
    group: int = field(default=0, init=False)
    norm: Array
    eps: float
    mixed: Array
    """Matrix that gives the inputs of the convolution."""
    gate: Array | None
    small: Array | None
    """Matrix that gives b and a of the gated delta rule, or dt of Mamba 2."""
    weights: Any
    """Other weights, of the backend's `RecurrentOperators.load`."""
    out: Array

    def mix(self, backend: Backend, x: Array, batch: StepBatch, caches: Caches) -> Array:
        x = backend.rms_norm(x, self.norm, self.eps)
        of: tuple[Any, ...] = self.weights, caches.states, self.index, batch
        y = backend.linear(x, self.mixed)
        if self.gate is None:
            return backend.recurrent.convolve(y, *of)
        gate, small = backend.linear(x, self.gate), backend.linear(x, self.small)
        y = backend.recurrent.recur(backend.recurrent.convolve(y, *of), small, *of)
        return backend.recurrent.gated_norm(y, gate, self.weights)


def load_recurrence(
    loader: Loader, prefix: str, number: int, recurrent: RecurrentConfig, names: Names
) -> Recurrence:
    """Load a recurrent layer. ``A_log`` becomes a rate of decay."""
    family, load = recurrent.family, loader.backend.load_vector
    vectors: dict[str, Any] = {
        name: loader.read(prefix + family.vectors + name).astype(np.float64)
        for name in recurrent.vectors
    }
    if "A_log" in vectors:
        vectors["A_log"] = np.array([exp(rate) for rate in vectors["A_log"].tolist()])
    vectors = {name: load(vector) for name, vector in vectors.items()}
    matrices = {
        part: loader.selected(
            prefix, [(name, np.array([*chain(*ranges)])) for name, ranges in selections]
        )
        for part, selections in recurrent.projections().items()
    }
    kernels = [loader.read(f"{prefix}{name}.weight")[:, 0] for name in family.conv]
    conv_bias = None
    if recurrent.conv_bias:
        biases = [loader.read(f"{prefix}{name}.bias") for name in family.conv]
        conv_bias = load(np.concatenate(biases))
    return Recurrence(
        index=number,
        norm=loader.norm(prefix, names.attention_norm),
        eps=loader.eps,
        mixed=matrices["mixed"],
        gate=matrices.get("gate"),
        small=matrices.get("small"),
        weights=loader.backend.recurrent.load(
            shape=recurrent.shape,
            conv=load(np.concatenate(kernels).T.ravel()),
            conv_bias=conv_bias,
            rates=vectors.get("A_log"),
            dt_bias=vectors.get("dt_bias"),
            skip=vectors.get("D"),
            most=recurrent.largest_beta,
            norm=loader.vector(prefix, family.norm and f"{family.norm}.weight"),
            norm_size=recurrent.norm_size,
            gates_first=recurrent.shape.kind == "mamba",
            eps=recurrent.norm_eps,
        ),
        out=loader.linear(prefix, family.out),
    )
