"""Limit the size of everything in a model directory, because it is untrusted input.

Each limit is far beyond every published model of the supported families. Below them, no file can
take more than a second of CPU time or 200 MB before it is accepted or refused (`tests/security`).
"""

MAX_JSON_BYTES = 1 << 20
"""Bytes of ``config.json`` or ``generation_config.json``. Real files have a few kilobytes.

The parsed form takes up to 50 times the bytes of the file.
"""

MAX_HEADER_BYTES, MAX_HEADERS_BYTES, MAX_INDEX_BYTES = 2 << 20, 6 << 20, 4 << 20
"""Bytes of the header of a weights file, of all headers of a model, and of the index.

A tensor takes about 130 bytes, and 95 in the index. Llama 3.1 405B has 140 kB, and Qwen3-235B with
36,000 matrices of experts 4.8 MB and 3.5 MB.
"""

MAX_SHARDS = 1024
"""Number of weights files of one model. Llama 3.1 405B has 191."""

MAX_NAME_BYTES = 255
"""Bytes of a file name, as Linux allows it."""

MAX_LAYERS = 1024
"""Number of layers. Llama 3.1 405B has 126. Each has a dozen names before weights are opened."""

MAX_WIDTH = 1 << 20
"""Hidden and intermediate sizes, numbers of heads, and their size. Llama 3.1 405B has 53,248."""

MAX_EXPERTS, MAX_EXPERTS_OF_MODEL = 1024, 1 << 15
"""Number of experts of a layer, and of all layers. Qwen3-235B has 128 and 12,032."""

MAX_VOCABULARY = 1 << 24
"""Rows of the embedding. Gemma has 262,144."""

MAX_CONTEXT = (1 << 31) - 1
"""Positions, windows and context lengths. Positions are 32-bit integers in the kernels."""

MAX_PATTERNS = 1024
"""Number of names and patterns in a list of modules. Each is compared with every module's name."""

MAX_TOKEN_IDS = 1024
"""Number of end-of-sequence ids. Each generated token is compared with them."""

MIN_EPS, MAX_EPS = 1e-20, 1.0
"""Bounds of ``rms_norm_eps``. It must not vanish in float32. Models have 1e-5 and 1e-6."""

MIN_THETA, MAX_THETA = 1.001, 1e15
"""Bounds of ``rope_theta``. Its logarithm is a divisor. Models for a million tokens have 3e9."""

MIN_FACTOR, MAX_FACTOR = 1e-6, 1e6
"""Bounds of the factors, frequencies and scalings of RoPE. Models have 0.1 … 128."""

MAX_GGUF_HEADER_BYTES = 32 << 20
"""Bytes of metadata and list of tensors of a GGUF file. A vocabulary of 200,000 takes 13 MB."""

MAX_GGUF_KEYS, MAX_GGUF_TENSORS = 4096, 32768
"""Numbers of keys and tensors of a GGUF file. Llama 3.1 405B has 30 and 1,138."""

MAX_GGUF_TEXTS = 1 << 20
"""Texts in the arrays of a GGUF file: tokens and merges. Gemma 3 has 780,000."""

MAX_GGUF_ALIGNMENT = 1 << 20
"""Maximum alignment of the tensors of a GGUF file. Files in use have 32."""

MAX_PIECE_LENGTH, MAX_PIECE_CHARACTERS = 256, 1 << 22
"""Characters of a piece, and of all pieces, of a SentencePiece vocabulary in a GGUF file.

Each division of a piece into two is looked up. Llama 2 has 48 and 190,000.
"""

MAX_TOKEN_LENGTH = 1 << 14
"""Characters of a token of a byte-level vocabulary in a GGUF file. Llama 3 has 128."""
