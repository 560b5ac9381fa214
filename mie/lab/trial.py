"""Compute a small step with a backend, to test whether it works on this machine."""

import numpy as np

from mie.errors import MieError
from mie.ops.backend import Backend
from mie.ops.sampling import RowControls


def try_operators(backend: Backend) -> None:
    """Run four operators.

    A hidden state of eight ones goes through a head with the largest row 37, giving token 37.

    Raises:
        MieError: the backend computed another token.
    """
    head = np.zeros((64, 8), np.float32)
    head[37] = 1
    hidden = backend.activate(backend.load_vector(np.ones((1, 16), np.float32)), "silu")
    hidden = backend.rms_norm(hidden, backend.load_vector(np.ones(8, np.float32)), 1e-5)
    logits = backend.linear(hidden, backend.load_linear((64, 8), [head]))
    [token_id] = backend.sample(logits, [RowControls()])
    if token_id != 37:
        raise MieError(f"it computed token {token_id}, expected 37")
