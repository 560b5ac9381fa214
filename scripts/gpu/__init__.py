"""What scripts/gpu_check is made of: its parts, the processes they run in, and its page."""
