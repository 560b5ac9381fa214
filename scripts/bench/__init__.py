"""The modules that the benchmarks share, and those of bench_cpu.py and bench_gpu.py."""
