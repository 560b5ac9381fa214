"""Wire an engine together from a model directory and a configuration.

This is the one room that knows how the parts are built. It knows no callers.
"""
