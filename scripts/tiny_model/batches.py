"""Batches of training text, which worker processes write and encode."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from random import Random

import numpy as np
from model import Config
from stories import Segment, Writer
from tokenizers import Tokenizer

ODD = 0.35
"""The mean share of words that are not on the usual lists."""
DOCUMENTS_AT_ONCE = 1024
"""Documents that a worker writes for one request."""


@dataclass(frozen=True)
class Row:
    """The tokens of a document.

    Each is to be learned or only read, and is a part of one of the story's words or not.
    """

    tokens: list[int]
    learn: list[bool]
    slot: list[bool]


def encode(tokenizer: Tokenizer, document: list[Segment], slot_words: Iterable[str]) -> Row:
    """Return the tokens of a document whose story uses `slot_words`."""
    row = Row([], [], [])
    # The longest word comes first, since one may begin another.
    words = "|".join(map(re.escape, sorted(slot_words, key=len, reverse=True)))
    for text, wanted in document:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        inside = bytearray(len(text) + 1)
        if words:
            for match in re.finditer(rf"(?<!\w)(?:{words})(?!\w)", text):
                inside[match.start() : match.end()] = b"\1" * len(match.group())
        row.tokens.extend(encoding.ids)
        row.learn.extend([wanted] * len(encoding.ids))
        row.slot.extend(bool(inside[end - 1]) for _, end in encoding.offsets)
    return row


def pad(rows: list[Row]) -> np.ndarray:
    """Return tokens, learn masks and slot masks, together int16 [3, B, T]. Padding is masked."""
    length = max(len(row.tokens) for row in rows)
    length += -length % 32  # A GPU's library prepares each new shape.
    batch = np.zeros((3, len(rows), length), np.int16)
    for index, row in enumerate(rows):
        batch[:, index, : len(row.tokens)] = row.tokens, row.learn, row.slot
    return batch


class Batches:
    """Endless batches of at most `size` tokens, as `pad` returns them.

    Rows of similar length go together. `progress`, from 0 to 1, decides which documents the
    workers write next. The batches depend on nothing but `seed`, `size`, `processes` and the values
    that `progress` has when each batch is taken.
    """

    def __init__(self, tokenizer: Tokenizer, *, seed: int, size: int, processes: int) -> None:
        self.tokenizer, self.seed, self.size, self.processes = tokenizer, seed, size, processes
        self.progress = 0.0

    def __iter__(self) -> Generator[np.ndarray, None, None]:
        """Yield the batches. The workers end when the iterator is closed."""
        context = multiprocessing.get_context("spawn")  # since CUDA forbids a fork
        pool = ProcessPoolExecutor(self.processes, context, initializer=_follow_parent)
        waiting: deque[Future[list[np.ndarray]]] = deque()
        try:
            for index in itertools.count():
                seed = f"train-{self.seed}-{index}"
                args = self.tokenizer, seed, self.size, self.progress
                waiting.append(pool.submit(write_batches, *args))
                if len(waiting) > self.processes + 1:
                    yield from waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent process, and end when it ends in any way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def write_batches(tokenizer: Tokenizer, seed: str, size: int, progress: float) -> list[np.ndarray]:
    """Return the batches of `DOCUMENTS_AT_ONCE` new documents, in random order."""
    writer, rows = Writer(seed, odd=ODD), []
    for _ in range(DOCUMENTS_AT_ONCE):
        document = writer.document(progress)
        rows.append(encode(tokenizer, document, writer.slot_words))
    rows = [row for row in rows if len(row.tokens) <= Config.max_position_embeddings]
    rows.sort(key=lambda row: len(row.tokens))
    groups: list[list[Row]] = []
    for row in rows:
        if not groups or (len(groups[-1]) + 1) * len(row.tokens) > size:
            groups.append([])
        groups[-1].append(row)
    Random(seed).shuffle(groups)
    return [pad(group) for group in groups]
