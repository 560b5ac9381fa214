"""Hold counts and times as plain data. The other rooms fill them in, and callers read them.

This room uses only the standard library.
"""
