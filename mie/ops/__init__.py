"""Implement the operators in NumPy, as the reference definition and as a plain CPU backend.

This room handles arrays. A slot is just an integer here, and requests are unknown.
"""
