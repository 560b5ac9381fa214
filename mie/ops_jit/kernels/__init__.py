"""The kernels, as Python that Numba compiles. Each file is one idea."""
