"""The modules of scripts/gpu_check, and the kernels that nvrtc_check.py compiles."""
