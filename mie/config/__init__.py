"""Declare every setting of an engine and of its callers, once.

This room handles names, defaults and limits. It imports no arrays, no files and no engine.
"""
