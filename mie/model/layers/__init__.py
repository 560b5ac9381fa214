"""Variants of layers: layers that keep a state, and layers with experts."""
