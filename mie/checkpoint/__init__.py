"""Read a model directory or a GGUF file, or refuse it by name. Both are untrusted input.

This room handles files, configurations and weights. It imports no operators and no requests.
"""
