"""Watch an engine: metrics, snapshots for the event log, and the reason why a sequence waits.

These modules change nothing in the engine.
"""
