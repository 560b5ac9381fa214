"""Read a model directory, which is untrusted input, or refuse it by name.

This room knows files, configurations and weights. It knows no operators and no requests.
"""
