"""Describe NumPy, its BLAS, and how `CpuBackend` multiplies with them here.

NumPy is imported only when a function is called, so that a broken one is an error of that call.
"""

from typing import Any

TRIED_SHAPE = (2048, 2048)
"""The shape of a matrix in a middling model."""


def numpy_facts() -> dict[str, str]:
    """Return NumPy's "version", and the "blas" and "blas_version" that it was built with."""
    import numpy as np

    config: Any = np.show_config(mode="dicts")  # type: ignore[call-overload, unused-ignore]
    blas = config["Build Dependencies"].get("blas", {})
    names = {"blas": blas.get("name", "unknown"), "blas_version": blas.get("version", "unknown")}
    return {"version": np.__version__, **names}


def products_facts() -> dict[str, Any]:
    """Return how `CpuBackend` multiplies by a matrix of `TRIED_SHAPE`.

    The facts are the "plan" that the probe chooses, the fastest "invariant" plan and the fastest
    "other" one, the "ratio" of their times, "is_clear", which is false if the ratio speaks for
    another plan, the "kernels" of the BLAS, "is_controlled", which is false if the number of its
    threads cannot be set, and "num_threads" of the backend. "odd_plans" are the remembered shapes
    whose plan differs from the rest, "cache" is the folder of the remembered plans, and
    "cache_error" says why there is none.
    """
    from mie.ops_cpu.cpu_backend import CpuBackend
    from mie.ops_cpu.linear.probe import TOLERATED

    backend = CpuBackend()
    probe = backend.find_probe()
    with backend.blas.threads(1):
        plan, ratio = probe.plan(*TRIED_SHAPE)
        invariant = probe.invariant(*TRIED_SHAPE).name
    other = probe.fastest(*TRIED_SHAPE)
    return {
        "plan": plan,
        "invariant": invariant,
        "other": "plain" if other is None else other.name,
        "ratio": ratio,
        "is_clear": (ratio <= TOLERATED) == (plan == invariant),
        "kernels": backend.blas.core,
        "is_controlled": backend.blas.is_controlled,
        "num_threads": backend.workers.num_threads,
        "odd_plans": [
            f"{each.shape} {each.plan} (the fastest invariant plan took {each.ratio:.2f} x the "
            f"time of the fastest other one, {each.day})"
            for each in probe.answers.odd_ones()
        ],
        "cache": str(probe.answers.folder),
        "cache_error": backend.cache_error,
    }
