"""The flag that chooses the machine."""

from mie.errors import ConfigError
from mie.ops.backend import Backend
from mie.ops.numpy_backend import NumpyBackend

BACKENDS = ("numpy", "cupy", "cupy-emulated")


def load_backend(name: str, dtype: str = "auto") -> Backend:
    """The backend called ``name``, computing in ``dtype``.

    "cupy" is an NVIDIA GPU; "cupy-emulated" runs the GPU's kernels on the CPU, slowly, to check
    them, and needs a C++ compiler instead of CuPy.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend {name!r} is not available; choose from: {', '.join(BACKENDS)}")
    if name == "numpy":
        return NumpyBackend(dtype)
    from mie.ops_gpu.cupy_backend import load_cupy_backend, load_emulated_backend

    return load_cupy_backend(dtype) if name == "cupy" else load_emulated_backend(dtype)
