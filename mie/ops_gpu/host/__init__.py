"""The same .cu files on a CPU: g++ builds them, one fiber runs each CUDA thread.

Knows NumPy arrays as memory; the checked build is a small compute-sanitizer.
"""
