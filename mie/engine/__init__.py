"""Run the model step by step over the requests of a scheduler, and measure each step.

This room handles token ids and steps. It imports no text, no files and no callers.
"""
