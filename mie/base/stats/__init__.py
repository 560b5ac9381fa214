"""Hold counts and times as plain data, which the other rooms fill in and callers read.

This room knows only the standard library.
"""
