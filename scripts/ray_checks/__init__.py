"""The parts of ``ray_check.py``."""
