"""Define the operators of recurrent layers, which are a part of the Backend contract."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mie.ops.layers.recurrent_shape import RecurrentShape

if TYPE_CHECKING:
    from mie.ops.backend import Backend, StepBatch

Array = Any  # of the backend


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentWeights:
    """The weights of a recurrent layer but for its matrices, in the backend's layout.

    A short convolution has only those of the convolution. None is absent.
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
    """Layers that keep a state for each sequence, in slots.

    ``layer`` counts those layers. Each sequence of a batch reads its states from its slot, and
    writes them there.
    """

    def state_bytes(self: "Backend", shape: RecurrentShape) -> int:
        """Return the bytes of one slot in one layer."""

    def new_state_cache(
        self: "Backend", shape: RecurrentShape, num_layers: int, num_slots: int
    ) -> Any:
        """Allocate the states of ``num_slots`` sequences."""

    def copy_states(self: "Backend", states: Any, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole slots in every layer: `ops.recurrent.move_states`."""

    def export_state(self: "Backend", states: Any, slot: int) -> bytes:
        """Return the contents of a slot, for `import_state` of the same model and backend."""

    def import_state(self: "Backend", states: Any, slot: int, data: bytes) -> None:
        """Fill a slot with the result of `export_state`."""

    def short_conv(
        self: "Backend",
        bcx: Any,
        weights: RecurrentWeights,
        states: Any,
        layer: int,
        batch: "StepBatch",
    ) -> Any:
        """Return c · conv(b · x) [T, D] of bcx [T, 3 D]: `ops.recurrent.causal_conv`."""

    def conv_silu(
        self: "Backend",
        x: Any,
        weights: RecurrentWeights,
        states: Any,
        layer: int,
        batch: "StepBatch",
    ) -> Any:
        """Convolve, then apply SiLU, as [T, C]: `ops.recurrent.causal_conv`."""

    def gated_delta(
        self: "Backend",
        qkv: Any,
        gates: Any,
        weights: RecurrentWeights,
        states: Any,
        layer: int,
        batch: "StepBatch",
    ) -> Any:
        """Run the gated delta rule, as [T, H Dv]: `ops.recurrent.gated_delta`.

        qkv [T, C] and gates [T, 2 H] are those of `ops.recurrent.delta_inputs`.
        """

    def mamba(
        self: "Backend",
        xbc: Any,
        dt: Any,
        weights: RecurrentWeights,
        states: Any,
        layer: int,
        batch: "StepBatch",
    ) -> Any:
        """Run Mamba 2, as [T, H Dv]: `ops.recurrent.mamba`.

        xbc [T, C] and dt [T, H] are those of `ops.recurrent.mamba_inputs`.
        """

    def gated_norm(self: "Backend", x: Any, gate: Any, weights: RecurrentWeights) -> Any:
        """Normalise the result of a recurrence [T, H Dv] with a gate: `ops.norm.gated_norm`."""
