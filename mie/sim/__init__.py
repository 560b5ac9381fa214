"""The simulator: the real scheduler and allocator on a clock that costs drive, and the loads and
metrics that it shares with the real engine.

This room knows costs, loads and times. It computes no logits, and only `calibrate` knows arrays.
"""
