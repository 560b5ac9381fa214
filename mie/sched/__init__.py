"""Plan the next step.

This room knows sequences and budgets, and gets its blocks from `mie.memory`. It imports no NumPy
and reads no clock.
"""
