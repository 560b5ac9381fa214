"""Teach the engine with nine exercises, each a file with holes that a learner fills.

The solutions are the tutorial's files. This room makes the exercises from them (`exercises`), runs
a learner's file in a process of its own (`check`), and explains the first rule that it breaks
(`checks`). It uses the tutorial's code and the bundled model, and nothing of mie's engine.
"""
