"""Modules of bench_cpu.py. Peers run `child` in their own interpreters, so it imports little."""
