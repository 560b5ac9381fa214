"""Run the operators as CUDA kernels (kernels/*.cu), on a GPU or emulated on a CPU.

This room handles arrays and kernels, but no requests, no sequences and no owners of block tables.
"""
