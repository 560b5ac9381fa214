"""Run helper processes that compute in memory they share with the engine's process.

Threads of one process take turns to hold the GIL, so a helper thread begins tens of microseconds
after its signal. A process has its own GIL. This package knows memory, locks and processes.
"""
