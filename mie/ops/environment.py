"""Describe NumPy and its BLAS.

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
    """Return how backend numpy multiplies.

    The facts are the "kernels" of the BLAS, "is_controlled" (false if the number of
    threads cannot be set), and the "num_threads" of large steps.
    """
    from mie.base.resources import available_cpus
    from mie.ops.blas import Blas

    blas = Blas()
    return {
        "kernels": blas.core,
        "is_controlled": blas.is_controlled,
        "num_threads": available_cpus(),
    }
