"""How large anything in a model directory may be. A model is untrusted input.

Each limit is far beyond every published model of the supported families. Below them, no file can
take more than a second of CPU time or 200 MB before it is accepted or refused (`tests/security`).
"""

MAX_JSON_BYTES = 1 << 20
"""``config.json`` and ``generation_config.json``, which have a few kilobytes. What was parsed takes
up to 50 times the bytes of the file."""

MAX_HEADER_BYTES = 2 << 20
"""Headers of all weights files of a model together, and the index of its shards. A tensor takes
about 120 bytes: Llama 3.1 405B has 140 kB, and `MAX_LAYERS` layers of Qwen2 have 1.9 MB."""

MAX_SHARDS = 1024
"""Weights files of one model. Llama 3.1 405B has 191."""

MAX_NAME_BYTES = 255
"""The name of a file, as Linux allows it."""

MAX_JSON_DIGITS = 1000
"""Digits of an integer in JSON: reading one takes time that grows with their square."""

MAX_DIMENSIONS = 8
"""Dimensions of a tensor. A model's tensors have one or two."""

MAX_LAYERS = 1024
"""Llama 3.1 405B has 126. Every layer is a dozen of names before the weights are even opened."""

MAX_WIDTH = 1 << 20
"""Hidden and intermediate sizes, numbers of heads, and their width. Llama 3.1 405B has 53,248."""

MAX_VOCABULARY = 1 << 24
"""Rows of the embedding. Gemma has 262,144."""

MAX_CONTEXT = (1 << 31) - 1
"""Positions, windows and context lengths: positions are 32-bit integers in the kernels."""

MAX_TOKEN_IDS = 1024
"""End-of-sequence ids: each generated token is compared with them."""

MIN_EPS, MAX_EPS = 1e-20, 1.0
"""``rms_norm_eps``, which float32 must tell from 0. Models have 1e-5 and 1e-6."""

MIN_THETA, MAX_THETA = 1.001, 1e15
"""``rope_theta``, whose logarithm is a divisor. Models for a million tokens have 3e9."""

MIN_FACTOR, MAX_FACTOR = 1e-6, 1e6
"""Factors, frequencies and scalings of RoPE. Models have 0.1 … 128."""
