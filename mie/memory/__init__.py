"""Manage the paged KV cache: which block holds which tokens, and which sequences hold the block.

This room works on integers (block ids, token ids). It imports no arrays, no model and no sequences.
"""
