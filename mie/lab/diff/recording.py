"""Wrap a backend to show every operator's result to an observer. It may replace the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.activation import Activation
from mie.ops.backend import Array, Backend, StepBatch
from mie.ops.sampling import RowControls

ROLES = {
    (operator, before): role
    for operator, before, role in json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    )
}
"""Roles by (operator, previous role), in the order of calls in `Decoder.forward`."""

OPERATORS = tuple(dict.fromkeys(ROLES.values()))
"""The roles, in the order of a step."""

METHODS = tuple(dict.fromkeys(method for method, _ in ROLES))
"""The operators that are recorded: methods of the backend, or functions that define them."""

AFTER_ROWS = frozenset({"take_rows", "final_norm", "head", "soft_cap", "logits"})
"""Roles with a row for each wanted row of logits. The others have one for each token."""

OUTSIDE_LAYERS = AFTER_ROWS | {"embed"}


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One operator call of a run."""

    step: int
    """Number of the step, from 1."""
    layer: int | None
    """The layer, or None outside the layers."""
    operator: str
    """The role, one of `OPERATORS`."""
    occurrence: int
    """Index among the calls of this operator in this layer and step, nearly always 0."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        return f"step {self.step}{layer}, {self.operator}"


Observer = Callable[[Spot, NDArray[Any]], NDArray[Any] | None]
"""A function that receives a copy of each result in its own dtype. It widens to float64 exactly.

If it returns an array, that replaces the result.
"""


def to_host(array: Array) -> NDArray[Any]:
    """Copy the backend's array to a NumPy array."""
    return np.array(array) if isinstance(array, np.ndarray) else np.asarray(array.get())


def put(array: Array, values: NDArray[Any]) -> None:
    """Write the values, rounded to its dtype, to the backend's array."""
    if isinstance(array, np.ndarray):
        array[...] = values
        return
    staged = type(array)(array.shape, array.dtype)  # contiguous, which ``array`` may not be
    staged.set(np.ascontiguousarray(values.astype(array.dtype)))
    array[...] = staged


class RecordingBackend:
    """Passes every call on to ``inner``, and shows the results of `METHODS` to ``observe``.

    Operators that ``inner`` may compute in one call are composed of single ones, to see each.

    A step's calls follow the decoder's order, so each has its role and layer by its place. The keys
    and values that `rope_write_kv` writes are internal to the backend. They show in the results of
    `paged_attention`. Recurrent states show in the results of later steps.
    """

    is_asynchronous = False  # each result is observed before the next is computed
    norm_linear, norm_gate_up = Backend.norm_linear, Backend.norm_gate_up
    norm_heads = Backend.norm_heads

    def __init__(self, inner: Backend, observe: Observer) -> None:
        self.greedy: list[int] = []
        """The tokens of the last step's largest logits, by ``inner``'s own sampling."""
        self._inner = inner
        self._observe = observe
        self._step = 0
        self._layer = 0
        self._previous: str | None = None
        self._counts: dict[tuple[int | None, str], int] = {}
        self._num_tokens: int | None = None
        self._num_rows: int | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in METHODS:
            return found
        return lambda *args, **kwargs: self._seen(name, found(*args, **kwargs))

    def activate(self, gate_up: Array, activation: Activation) -> Array:
        out = self._inner.activate(gate_up, activation)
        method = {"silu": "silu_mul", "gelu_tanh": "gelu_mul"}.get(activation)
        return out if method is None else self._seen(method, out)

    @property
    def experts(self) -> _Layers:
        methods = {"route": "route", "compute": "experts"}
        return _Layers(self._inner.experts, lambda name, _: methods.get(name), self._seen)

    @property
    def recurrent(self) -> _Layers:
        return _Layers(self._inner.recurrent, _recurrent_method, self._seen)

    def run_step(self, forward: Callable[[StepBatch], Array], batch: StepBatch) -> Array:
        self._step += 1
        self._layer = 0
        self.greedy = []
        self._previous = None
        self._counts = {}
        self._num_tokens, self._num_rows = len(batch.token_ids), len(batch.logits_rows)
        logits = self._inner.run_step(forward, batch)
        assert self._counts, f"run_step of {self.name} did not call forward (set enforce_eager)"
        return self._seen("run_step", logits)

    def head_norm(self, qkv: Array, first: int, last: int, weight: Array, eps: float) -> None:
        self._inner.head_norm(qkv, first, last, weight, eps)
        self._seen("head_norm", qkv[:, first:last])

    def sample(self, logits: Array, rows: Sequence[RowControls]) -> list[int]:
        self.greedy = self._inner.sample(logits, [RowControls()] * len(rows))
        return self._inner.sample(logits, rows)

    def start_sample(self, logits: Array, rows: Sequence[RowControls]) -> list[int]:
        return self.sample(logits, rows)

    def finish_sample(self, drawn: list[int]) -> list[int]:
        return drawn

    def _seen(self, method: str, out: Array) -> Array:
        if self._step == 0 or _is_gate_of_mlp(method, self._previous, out):
            return out  # the first is of a step that makes the device ready
        operator = ROLES.get((method, self._previous), method)
        is_last = self._previous in ("experts", "mlp_post_norm")
        if is_last or (self._previous == "down" and operator not in ("experts", "mlp_post_norm")):
            self._layer += 1
        layer = None if operator in OUTSIDE_LAYERS else self._layer
        occurrence = self._counts.get((layer, operator), 0)
        self._counts[layer, operator] = occurrence + 1
        spot = Spot(step=self._step, layer=layer, operator=operator, occurrence=occurrence)
        # A backend may have padded the step. The rows after its own are padding.
        seen = out[: self._num_rows if operator in AFTER_ROWS else self._num_tokens]
        instead = self._observe(spot, to_host(seen))
        if instead is not None:
            put(seen, instead)
        self._previous = operator
        return out


class _Layers:
    """The operators of layers that not every model has. Their results are recorded, too."""

    def __init__(
        self,
        inner: Any,
        method_of: Callable[[str, Sequence[Any]], str | None],
        seen: Callable[[str, Array], Array],
    ) -> None:
        """Take a function that returns one of `METHODS` for an operator and its arguments."""
        self._inner, self._method_of, self._seen = inner, method_of, seen

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            out, method = found(*args, **kwargs), self._method_of(name, args)
            return out if method is None else self._seen(method, out)

        return call


def _recurrent_method(name: str, args: Sequence[Any]) -> str | None:
    """Return the operator's name among `METHODS`. It depends on the kind of the layer."""
    if name == "convolve":
        return "short_conv" if args[1].shape.kind == "conv" else "conv_silu"
    if name == "recur":
        return "gated_delta" if args[2].shape.kind == "delta" else "mamba"
    return name if name == "gated_norm" else None


def _is_gate_of_mlp(method: str, previous: str | None, out: Array) -> bool:
    """Whether a result is the gate of an MLP beside experts: one number for each token.

    Nothing beside it shows whether an error of a number near zero is large. It is compared in
    ``gated_mlp``.
    """
    return method == "linear" and previous == "silu_mul" and out.shape[-1] == 1
