"""Get facts from libraries that may be missing, broken or slow.

`Machine.ask` runs `main` in a separate process, so a driver that crashes or hangs affects nothing
else. It prints one JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence

from mie.doctor.machine import Facts
from mie.errors import MieError
from mie.ops_cpu.environment import numpy_facts, products_facts
from mie.ops_gpu.environment import cupy_facts, driver_facts, one_line


def backend_facts(name: str) -> Facts:
    """Try four operators of the backend ``name``. There are no facts if they compute correctly.

    A hidden state of eight ones goes through a head whose row 37 is the largest, giving token 37.

    Raises:
        MieError: the backend cannot be loaded, or computed another token.
    """
    import numpy as np

    from mie.load.backends import load_backend
    from mie.ops.sampling import RowControls

    backend = load_backend(name)
    head = np.zeros((64, 8), np.float32)
    head[37] = 1
    hidden = backend.silu_mul(backend.load_vector(np.ones((1, 16), np.float32)))
    hidden = backend.rms_norm(hidden, backend.load_vector(np.ones(8, np.float32)), 1e-5)
    logits = backend.linear(hidden, backend.load_linear((64, 8), [head]))
    [token_id] = backend.sample(logits, [RowControls()])
    if token_id != 37:
        raise MieError(f"it computed token {token_id}, expected 37")
    return {}


TOPICS: Mapping[str, Callable[..., Facts]] = {
    "numpy": numpy_facts,
    "products": products_facts,
    "driver": driver_facts,
    "cupy": cupy_facts,
    "backend": backend_facts,
}


def find_facts(topic: str, *arguments: str) -> Facts:
    """Return the facts of one topic, or the fact "error"."""
    try:
        return TOPICS[topic](*arguments)
    except Exception as error:
        kind = "" if isinstance(error, MieError) else f"{type(error).__name__}: "
        return {"error": f"{kind}{one_line(error)}"}


def main(arguments: Sequence[str]) -> None:
    """Print the facts of one topic, apart from what libraries write to standard output."""
    output = os.dup(1)
    os.dup2(2, 1)
    os.write(output, json.dumps(find_facts(*arguments)).encode() + b"\n")
