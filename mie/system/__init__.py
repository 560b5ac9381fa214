"""Ask the operating system: CPUs, memory, files, commands, signals, workers and the log.

This room knows the standard library and the errors alone.
"""
