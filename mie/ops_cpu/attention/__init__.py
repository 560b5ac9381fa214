"""Compute attention over the paged KV cache on threads.

`mie.ops.attention` defines what it computes. docs/cpu-attention.md is the map: a picture, a
glossary, which path runs when, and what each constant is.
"""
