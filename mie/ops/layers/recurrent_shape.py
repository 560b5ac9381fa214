"""Define the sizes of recurrent layers.

`mie.ops.layers.recurrent` has the letters and the operators.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["conv", "delta", "mamba"]
"""LFM2's short convolution, Gated DeltaNet (arXiv:2412.06464) or Mamba 2 (arXiv:2405.21060)."""


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    """The sizes of a recurrent layer. A short convolution is one head without keys."""

    kind: Kind
    kernel_size: int
    num_groups: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """The outputs of the recurrence, H Dv."""
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """The channels of the convolution: queries, keys and values, or x, B and C."""
        return 2 * self.num_groups * self.key_dim + self.width

    @property
    def num_elements(self) -> int:
        """The numbers that a layer keeps for a sequence: columns of the convolution, and states."""
        return (self.kernel_size - 1) * self.num_channels + self.key_dim * self.width

    @property
    def num_results(self) -> int:
        """The results of a token: projections, convolution, recurrence and norm.

        A short convolution's projection has three parts.
        """
        if self.kind == "conv":
            return 4 * self.width
        return 2 * self.num_channels + 2 * self.num_heads + 3 * self.width
