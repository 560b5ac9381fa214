"""The modules of bench_cpu.py (`cpu/`), bench_gpu.py (`gpu/`) and bench_sched.py."""
