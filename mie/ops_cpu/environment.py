"""Describe NumPy, its BLAS, and how `CpuBackend` multiplies with them here.

NumPy is imported only when a function is called, so that a broken one is an error of that call.
"""

from typing import Any


def numpy_facts() -> dict[str, str]:
    """Return NumPy's "version", and the "blas" and "blas_version" that it was built with."""
    import numpy as np

    config: Any = np.show_config(mode="dicts")  # type: ignore[call-overload, unused-ignore]
    blas = config["Build Dependencies"].get("blas", {})
    names = {"blas": blas.get("name", "unknown"), "blas_version": blas.get("version", "unknown")}
    return {"version": np.__version__, **names}


def products_facts() -> dict[str, Any]:
    """Return how `CpuBackend` multiplies.

    The facts are the "plan" of matrices by default, the "kernels" of the BLAS, "is_controlled",
    which is false if the number of its threads cannot be set, and "num_threads" of the backend.
    """
    from mie.ops_cpu.cpu_backend import CpuBackend

    backend = CpuBackend()
    return {
        "plan": backend.linear_plan,
        "kernels": backend.blas.core,
        "is_controlled": backend.blas.is_controlled,
        "num_threads": backend.workers.num_threads,
    }
