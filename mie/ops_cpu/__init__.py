"""Run a model on a CPU with NumPy: `CpuBackend`, its matrices, its attention and its threads.

It knows arrays, and nothing of requests. `mie.ops` defines every result.
"""
