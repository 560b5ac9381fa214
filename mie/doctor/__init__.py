"""What this machine can run: facts, what is wrong with them, and the remedy of each.

Knows files, commands and versions, never a model. Whatever could crash or hang (NumPy, CuPy, the
driver) is asked in a process of its own; what is not there is a fact, never an error.
"""
