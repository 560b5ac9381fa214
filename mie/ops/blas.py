"""Name NumPy's BLAS, and limit the threads that it uses.

NumPy is imported only when a function is called, so that a broken one is an error of that call.
"""

from contextlib import AbstractContextManager
from typing import Any


class Blas:
    """NumPy's BLAS. The number of threads is one for the whole process."""

    def __init__(self) -> None:
        import numpy  # noqa: F401  # a library that is not loaded is not found
        from threadpoolctl import ThreadpoolController  # backend jit has no use for it

        self._controller: Any = ThreadpoolController().select(user_api="blas")
        libraries = sorted(
            self._controller.info(), key=lambda library: "numpy" not in library["filepath"]
        )
        self.is_controlled = bool(libraries)
        """Whether threadpoolctl can set the number of threads."""
        self.core: str = libraries[0].get("architecture", "unknown") if libraries else "unknown"
        """The CPU type of the kernels, such as "SkylakeX"."""

    def limit(self, num_threads: int) -> AbstractContextManager[object]:
        """Use at most ``num_threads`` threads inside the context, and restore the number after."""
        limited: AbstractContextManager[object] = self._controller.limit(limits=num_threads)
        return limited


def numpy_facts() -> dict[str, str]:
    """Return NumPy's "version", and the "blas" and "blas_version" that it was built with."""
    import numpy as np

    config: Any = np.show_config(mode="dicts")  # type: ignore[call-overload, unused-ignore]
    blas = config["Build Dependencies"].get("blas", {})
    names = {"blas": blas.get("name", "unknown"), "blas_version": blas.get("version", "unknown")}
    return {"version": np.__version__, **names}
