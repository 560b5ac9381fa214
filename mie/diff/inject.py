"""Inject a fault on purpose, to check that it is found."""

import re
from dataclasses import dataclass

import numpy as np

from mie.diff.recording import METHODS, OPERATORS, Spot, to_host
from mie.errors import ConfigError
from mie.ops.backend import Array

SIZE = 0.01
"""Relative size of the fault, unless that is within the tolerance."""


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A fault in one element of every result of an operator."""

    operator: str
    """A role, or an operator of the contract, which stands for all its roles."""
    layer: int | None = None
    """The layer, or None for every call."""

    @classmethod
    def parse(cls, text: str) -> "Injection":
        """Parse ``OP`` or ``OP:LAYER``.

        Raises:
            ConfigError: the text has another form.
        """
        found = re.fullmatch(r"(\w+)(?::(\d{1,4}))?", text)
        if found is None or found[1] not in (*OPERATORS, *METHODS):
            known = ", ".join(dict.fromkeys((*OPERATORS, *METHODS)))
            raise ConfigError(f"--inject takes OP or OP:LAYER; got {text!r} (operators: {known})")
        return cls(operator=found[1], layer=None if found[2] is None else int(found[2]))

    def __str__(self) -> str:
        return self.operator if self.layer is None else f"{self.operator}:{self.layer}"

    def matches(self, spot: Spot) -> bool:
        """Return whether this call gets the fault."""
        is_operator = self.operator in (spot.operator, spot.method)
        return is_operator and self.layer in (None, spot.layer)


def perturb(out: Array, size: float) -> None:
    """Change the element of the largest magnitude by ``size`` times itself, in place."""
    host = to_host(out).astype(np.float64)
    if host.size:
        index = tuple(int(i) for i in np.unravel_index(int(np.abs(host).argmax()), host.shape))
        out[index] = float(host[index]) * (1 + size) or size
