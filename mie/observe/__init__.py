"""Look at an engine between two steps, for its page: the log, the counts, and why sequences wait.

This room changes nothing. It reads the private state of the scheduler.
"""
