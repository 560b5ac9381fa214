"""The operators in NumPy: the definition of what is right, and the CPU engine.

This room knows arrays. A slot is just an integer here; it never heard of a request.
"""
