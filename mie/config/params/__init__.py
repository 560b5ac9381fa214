"""Define the parameters of a request, and check them.

This room handles settings and plain values. It imports no model, no scheduler and no text.
"""
