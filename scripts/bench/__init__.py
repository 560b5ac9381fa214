"""The benchmarks of benchmark.py, and the modules that they share."""
