"""Read a model directory or a GGUF file, which is untrusted input, or refuse it by name.

This room knows files, configurations and weights. It knows no operators and no requests.
"""
