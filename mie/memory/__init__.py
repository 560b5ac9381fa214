"""Manage the paged KV cache: the tokens in each block, and the sequences that hold the block.

This room works on integers (block ids, token ids). It imports no arrays, no model and no sequences.
"""
