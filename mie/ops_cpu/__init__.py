"""The NumPy operators made fast: threads, layouts of weights, attention over runs of blocks.

This room knows arrays and threads. What it computes is defined in `mie.ops`.
"""
