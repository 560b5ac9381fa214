"""Simulate the real scheduler and allocator on a clock that costs drive.

Loads and metrics are shared with the real engine. This room handles costs, loads and times. It
computes no logits, and has no arrays.
"""
