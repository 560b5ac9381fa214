"""What scripts/bench_gpu.py is made of, one idea a module; peers are imported where they run."""
