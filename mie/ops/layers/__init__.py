"""Implement the operators of recurrent layers and of mixtures of experts in NumPy."""
