"""Who computes what in the next step.

This room knows sequences and budgets, and asks `mie.memory` for blocks. It imports no NumPy and
reads no clock.
"""
