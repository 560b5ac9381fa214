"""Define one decoder for every family, its configuration and its weights.

This room knows shapes, weights and the Backend contract. It knows no requests and no blocks.
"""
