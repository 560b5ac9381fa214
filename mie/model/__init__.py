"""Define one decoder for every family.

This room handles shapes, weights and the Backend contract. It imports no files, requests or blocks.
"""
