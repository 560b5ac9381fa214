"""Multiply by weight matrices in the layout that is fastest on this machine.

This package knows arrays and threads. `mie.ops.linear` defines what it computes.
"""
