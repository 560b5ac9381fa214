"""The modules of scripts/bench_gpu.py. Peers are imported only where they run."""
