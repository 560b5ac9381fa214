"""The Backend contract over NumPy arrays, fast: the CPU engine."""

from mie.ops.numpy_backend import NumpyBackend
from mie.ops_cpu.workers import Workers, available_cpus


class CpuBackend(NumpyBackend):
    """`NumpyBackend` with faster plans for what takes the time. "float32" (also "auto") or
    "float64"; ``num_threads`` threads, by default one for each CPU it may run on.
    """

    name = "numpy"

    def __init__(self, dtype: str = "auto", *, num_threads: int | None = None) -> None:
        super().__init__(dtype)
        self.workers = Workers(num_threads or available_cpus())
