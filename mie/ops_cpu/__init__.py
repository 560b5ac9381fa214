"""Make the NumPy operators fast, with threads, weight layouts, and attention over runs of blocks.

This room knows arrays and threads. `mie.ops` defines what it computes.
"""
