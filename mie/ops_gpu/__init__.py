"""The GPU path: CUDA kernels (kernels/*.cu), and what launches them on a GPU or on a CPU.

Knows arrays and kernels; must not know a request, a sequence or a block table's owner.
"""
