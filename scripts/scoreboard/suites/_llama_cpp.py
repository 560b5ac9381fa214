"""llama.cpp's logits of token ids, through its batch API and with its own settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_TOKENS = 1024
"""Size of the context and of a batch."""


class LlamaCpp:
    """A loaded model. The package llama-cpp-python is imported here."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        """Load the model.

        Raises:
            ValueError: llama.cpp cannot load the file.
        """
        import llama_cpp

        self._lib: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = NUM_TOKENS
        options.n_seq_max, options.kv_unified = 8, True
        options.n_threads = options.n_threads_batch = threads or len(os.sched_getaffinity(0))
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        self._batch = llama_cpp.llama_batch_init(NUM_TOKENS, 0, 1)
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def logits(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Return the logits [len(prompt), V] of each of at most eight prompts in one batch.

        Raises:
            ValueError: llama.cpp does not compute the batch.
        """
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)
        rows = [
            (token, position, seq)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = True
        if status := self._lib.llama_decode(self._context, batch):
            raise ValueError(f"llama_decode returned {status} for {len(rows)} tokens")
        pointer = self._lib.llama_get_logits(self._context)
        found = np.ctypeslib.as_array(pointer, (len(rows), self._vocab_size)).copy()
        ends = np.cumsum([len(prompt) for prompt in prompts])
        return np.split(found, ends[:-1])
