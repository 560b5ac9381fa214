"""Report on this machine: facts, problems, and a remedy for each.

This room knows files, commands and versions, but no models. Anything that can crash or hang (NumPy,
CuPy, the driver) is asked in its own process. A missing part is a fact, never an error.
"""
