"""Run the same .cu files on a CPU: g++ builds them, and one fiber runs each CUDA thread.

This room treats NumPy arrays as memory. The checked build is a small compute-sanitizer.
"""
