"""Compute attention over the paged KV cache on threads.

This package knows arrays, blocks and threads. `mie.ops.attention` defines what it computes.
"""
