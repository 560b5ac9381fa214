"""Define the operators of sparse layers, which are a part of the Backend contract."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from mie.ops.backend import Backend

Array = Any  # of the backend

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_silu")
"""All of them, which kernels know by their places."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """A layer's experts, in the backend's layout. E is their number, and k that of a token."""

    router: Array  # D inputs, E outputs
    gate_up: Array  # of `ExpertOperators.load_experts`: D inputs, 2 F outputs
    down: Array  # of `ExpertOperators.load_experts`: F inputs, D outputs
    number: int
    num_chosen: int
    is_normalised: bool  # whether the weights of a token's experts sum to 1
    activation: Activation
    bias: Array | None = None  # [E], for `ops.experts.route_by_sigmoid`


class ExpertOperators(Protocol):
    """Layers whose router chooses some of their experts for each token."""

    def load_experts(self: "Backend", matrices: Sequence[Array]) -> Array:
        """Return the matrices of a layer's experts, of `Backend.load_linear`, as one weight."""

    def route(self: "Backend", x: Array, weights: ExpertWeights) -> Array:
        """Multiply x [T, D] by the router, and choose: `ops.experts.route`.

        With ``weights.bias`` it is `ops.experts.route_by_sigmoid`. Returns [T, 2, k].
        """

    def clamped_silu_mul(self: "Backend", gate_up: Array) -> Array:
        """Apply gpt-oss's gated activation, as [T, F]: `ops.activation.clamped_silu_mul`."""

    def experts(
        self: "Backend", x: Array, routed: Array, weights: ExpertWeights, residual: Array
    ) -> Array:
        """Add the weighted results of each token's experts to the residual [T, D].

        x [T, D] is normalised: `ops.experts.experts`.
        """
