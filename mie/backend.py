"""The flag that chooses the machine."""

from mie.errors import ConfigError
from mie.ops.backend import Backend
from mie.ops.numpy_backend import NumpyBackend

BACKENDS = ("numpy",)


def load_backend(name: str, dtype: str = "auto") -> Backend:
    """The backend called ``name``, computing in ``dtype``."""
    if name not in BACKENDS:
        raise ConfigError(f"backend {name!r} is not available; choose from: {', '.join(BACKENDS)}")
    return NumpyBackend(dtype)
