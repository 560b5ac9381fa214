"""The compiled CPU backend: kernels in Python, compiled by Numba, run as recorded programs.

It handles arrays, addresses and threads. It imports no sequences and no requests. Only `kernels`
imports Numba, and only when something has to be compiled.
"""
