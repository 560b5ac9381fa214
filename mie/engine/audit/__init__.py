"""Read the private state of the memory and the scheduler.

The engine takes snapshots for the event log here. The checks compare the state with a computation
by brute force, and only the tests use them.
"""
