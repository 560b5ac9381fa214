"""Read the private state of the memory and the scheduler: as snapshots for the event log, and by
brute force for the tests.

No other room depends on the checks. The engine takes the snapshots.
"""
