"""Define one decoder for every family.

This room knows shapes, weights and the Backend contract. It imports no files, requests or blocks.
"""
