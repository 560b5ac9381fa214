"""Get facts from libraries that may be missing, broken or slow.

`Machine.ask` runs `main` in a separate process, so a driver that crashes or hangs affects nothing
else. It prints one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mie.doctor.machine import Facts
from mie.errors import MieError
from mie.ops_gpu.environment import driver_facts, library_facts, one_line

TRIED_SHAPE = (2048, 2048)
"""The shape of a matrix in a middling model."""


def numpy_facts() -> Facts:
    """Return NumPy's version, and the BLAS it was built with."""
    import numpy as np

    config: Any = np.show_config(mode="dicts")  # type: ignore[call-overload, unused-ignore]
    blas = config["Build Dependencies"].get("blas", {})
    names = {"blas": blas.get("name", "unknown"), "blas_version": blas.get("version", "unknown")}
    return {"version": np.__version__, **names}


def products_facts() -> Facts:
    """Return the kernels of NumPy's BLAS and the linear plan that the probe finds faster with them.

    The facts include the remembered shapes whose plan differs from the rest.
    """
    from mie.ops_cpu.cpu_backend import CpuBackend
    from mie.ops_cpu.linear.probe import TOLERATED

    backend = CpuBackend()
    probe = backend.find_probe()
    with backend.blas.threads(1):
        plan, ratio = probe.plan(*TRIED_SHAPE)
    return {
        "plan": plan,
        "ratio": ratio,
        "is_clear": (ratio <= TOLERATED) == (plan == "tiled"),
        "kernels": backend.blas.core,
        "is_controlled": backend.blas.is_controlled,
        "num_threads": backend.workers.num_threads,
        "odd_plans": [
            f"{each.shape} {each.plan} (tiled takes {each.ratio:.2f} x as long, {each.day})"
            for each in probe.answers.odd_ones()
        ],
        "cache": str(probe.answers.folder),
        "cache_error": backend.cache_error,
    }


def cupy_facts() -> Facts:
    """Return CuPy's version, the CUDA libraries it uses, and the free memory of each GPU."""
    facts: Facts = {"packages": _cupy_packages(sys.path)}
    try:
        import cupy
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return {**facts, "found": False}
        # CuPy frames the error with advice for many systems.
        return {**facts, "error": one_line(error).rpartition("Original error: ")[2].strip(" =")}
    return {**facts, "version": str(cupy.__version__), **library_facts(cupy)}


def _cupy_packages(folders: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed distributions of CuPy: {"cupy-cuda12x": "14.2.0"}."""
    paths = [path for folder in folders for path in Path(folder or ".").glob("cupy*.dist-info")]
    pattern = r"(cupy(?:_cuda\w+|_rocm\w+)?)-([^-]+)\.dist-info"
    found = [match for path in paths if (match := re.fullmatch(pattern, path.name))]
    return {match[1].replace("_", "-"): match[2] for match in found}


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
