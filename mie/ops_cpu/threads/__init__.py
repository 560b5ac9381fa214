"""Share a piece of work between threads, and keep BLAS to its own.

This package knows tasks. It knows nothing of what they compute.
"""
