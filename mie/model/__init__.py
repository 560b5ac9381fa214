"""One decoder for every family, its configuration and its weights.

This room knows shapes, weights and the Backend contract. It never heard of a request or a block.
"""
