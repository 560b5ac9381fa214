"""Ask the operating system: CPUs, memory, files, commands, signals and the log.

This room knows the standard library and the errors alone.
"""
