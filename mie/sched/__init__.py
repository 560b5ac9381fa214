"""Plan the next step.

This room handles sequences and budgets, and gets blocks from `mie.memory`. It imports no NumPy
and reads no clock.
"""
