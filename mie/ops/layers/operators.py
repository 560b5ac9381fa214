"""Define the operators of sparse and of recurrent layers. They extend the Backend contract.

`Backend.experts` and `Backend.recurrent` have them. A model without such layers needs neither.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mie.ops.activation import Activation
from mie.ops.backend import Array, Backend, StepBatch
from mie.ops.layers.recurrent_shape import RecurrentShape

Whole = Callable[[Array, int], Array]
"""Returns a result [T, N] with all of its N columns, if an operator gave a part of them."""


def unchanged(x: Array, width: int) -> Array:
    """Return a result that has all of its columns."""
    return x


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """The weights of a layer's experts, in the backend's layout."""

    router: Array  # D inputs, E outputs
    gate_up: Array  # for each expert: D inputs, 2 F outputs
    down: Array  # for each expert: F inputs, D outputs
    number: int  # E
    num_chosen: int  # k, experts of a token
    is_normalised: bool  # whether the weights of a token's experts sum to 1
    activation: Activation
    bias: Array | None = None  # [E], for `ops.layers.experts.route_by_sigmoid`


class ExpertOperators(Protocol):
    """Layers with a router that chooses some of their experts for each token.

    `mie.ranks` replaces ``backend`` and ``whole`` where the matrices of experts are divided.
    """

    backend: Backend
    whole: Whole

    def load(
        self, *, gate_up: Sequence[Array], down: Sequence[Array], **others: Any
    ) -> ExpertWeights:
        """Return the weights of a layer from the fields of `ExpertWeights`.

        ``gate_up`` and ``down`` are matrices of `Backend.load_linear`, one for each expert.
        """
        return ExpertWeights(gate_up=gate_up, down=down, **others)

    def route(self, x: Array, weights: ExpertWeights) -> Array:
        """Multiply x [T, D] by the router, and choose, as [T, 2, k]: `ops.layers.experts.route`.

        With ``weights.bias`` it is `ops.layers.experts.route_by_sigmoid`.
        """

    def compute(self, x: Array, routed: Array, weights: ExpertWeights, residual: Array) -> Array:
        """Add the weighted results of each token's experts to the residual [T, D].

        x [T, D] is normalised: `ops.layers.experts.experts`.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentWeights:
    """The weights of a recurrent layer but for its matrices, in the backend's layout.

    A short convolution has only ``conv`` and ``conv_bias``. None is absent.
    """

    shape: RecurrentShape
    conv: Array  # [W C], flat
    conv_bias: Array  # [C]
    rates: Array = None  # [H], exp(A_log)
    dt_bias: Array = None  # [H]
    skip: Array = None  # [H], D of Mamba 2
    most: float = 1.0  # the largest beta of the gated delta rule
    norm: Array = None  # [Dv] or [H Dv], of the result
    norm_size: int = 0  # channels that are normalised together
    gates_first: bool = False  # whether the gate multiplies before the norm
    eps: float = 0.0


class RecurrentOperators(Protocol):
    """Layers that keep a state for each sequence, in slots. `ops.layers.recurrent` defines them.

    ``layer`` counts the recurrent layers. Each sequence of a batch reads its states from its slot,
    and writes them there.
    """

    def load(self, **fields: Any) -> RecurrentWeights:
        """Return the weights of a layer from the fields of `RecurrentWeights`."""
        return RecurrentWeights(**fields)

    def state_bytes(self, shape: RecurrentShape) -> int:
        """Return the bytes of one slot in one layer."""

    def new_state_cache(self, shape: RecurrentShape, num_layers: int, num_slots: int) -> Any:
        """Allocate the states of ``num_slots`` sequences."""

    def copy_states(self, states: Any, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole slots in every layer. All are read before any is written."""
        states.copy(src, dst)

    def export_state(self, states: Any, slot: int) -> bytes:
        """Return the contents of a slot, for `import_state` of the same model and backend."""
        data: bytes = states.export(slot)
        return data

    def import_state(self, states: Any, slot: int, data: bytes) -> None:
        """Fill a slot with the result of `export_state`."""
        states.fill(slot, data)

    def convolve(
        self, x: Array, weights: RecurrentWeights, states: Any, layer: int, batch: StepBatch
    ) -> Array:
        """Convolve x, then apply SiLU, as [T, C]: `causal_conv`.

        A short convolution instead returns c · conv(b · x) [T, D] of bcx [T, 3 D].
        """

    def recur(
        self,
        mixed: Array,
        small: Array,
        weights: RecurrentWeights,
        states: Any,
        layer: int,
        batch: StepBatch,
    ) -> Array:
        """Run the gated delta rule or Mamba 2, as [T, H Dv]: `gated_delta`, `mamba`.

        ``mixed`` [T, C] and ``small`` are the first arguments of `delta_inputs` or `mamba_inputs`.
        """

    def gated_norm(self, x: Array, gate: Array, weights: RecurrentWeights) -> Array:
        """Normalise the result of a recurrence [T, H Dv] with a gate: `gated_norm`."""
