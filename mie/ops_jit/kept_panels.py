"""Keep the panels of a model in the user's cache, so that later loads map them.

    40 bytes   SHA-256 of the description, and its length
    JSON       the description: bytes and sum of the data, and each matrix: dtype and place of each
               segment
    data       from the next multiple of 4,096: the segments in order, each from a cache line on

The sum is of all words of 64 bits, modulo 2**64. It finds a file that a full disk or a crash has
cut or filled with zeros. No other user can write to the folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.base.cache_dir import DIGEST_BYTES, CacheError, is_private_file, open_cache

CACHE = "panels"
MIN_BYTES = 16 << 20
"""The least bytes of panels that are kept. Fewer are packed in less than 0.1 s."""
MAX_BYTES = 16 << 30
"""Maximum of all files together. Files that were not used for the longest time are removed."""
FREE_SHARE = 4
"""A file takes at most this part of the space that is free on the disk."""
FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
QUANTISED = "quantised"
_PAGE, _LINE = 4096, 64
_HEAD_BYTES, _MAX_DESCRIPTION = DIGEST_BYTES + 8, 16 << 20

logger = logging.getLogger(__name__)

Wanted = tuple[np.dtype[Any] | None, tuple[int, ...]]
"""The dtype and the shape of the panels of a segment. None: floats of the dtype in the file."""


class KeptPanels:
    """The panels of the matrices of a load, in the order of the load.

    They are mapped if the cache has them. Otherwise `write` keeps the panels that were packed.
    """

    def __init__(self, name: str, min_bytes: int, max_bytes: int = MAX_BYTES) -> None:
        """Look for the file. Its ``name`` is a digest of all that decides the panels."""
        self._name, self._min_bytes, self._max_bytes = name, min_bytes, max_bytes
        self._memory = np.empty(0, np.uint8)
        self._found: Sequence[Sequence[tuple[str, int]]] = []
        self._matrices: list[Sequence[NDArray[Any]]] = []
        self.num_packed = 0
        """How many matrices the cache did not have."""
        with suppress(OSError, CacheError):
            path = open_cache(CACHE) / name
            if is_private_file(path):
                self._open(path)

    def _open(self, path: Path) -> None:
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            whole = np.frombuffer(mapped, np.uint8)
            size = int.from_bytes(whole[DIGEST_BYTES:_HEAD_BYTES].tobytes(), "little")
            end = _HEAD_BYTES + min(size, _MAX_DESCRIPTION)
            text = whole[_HEAD_BYTES:end].tobytes()
            if hashlib.sha256(text).digest() != whole[:DIGEST_BYTES].tobytes():
                raise ValueError("another digest")
            description = json.loads(text)
            memory = whole[_aligned(end, _PAGE) :]
            if [len(memory), _sum(memory)] != [description["bytes"], description["sum"]]:
                raise ValueError("another sum")
            self._found, self._memory = description["matrices"], memory
        except ValueError as error:
            logger.warning("%s is damaged (%s); it is written again", path, error)
        else:
            os.utime(path)

    def take(self, wanted: Sequence[Wanted]) -> Sequence[NDArray[Any]] | None:
        """Return the segments of the next matrix, or None if the matrix has to be packed."""
        number = len(self._matrices)
        if number >= len(self._found):
            return None
        places = self._found[number]
        assert len(places) == len(wanted), "the name has a digest of all that decides the panels"
        segments = [
            self._segment(dtype or np.dtype(FLOATS[kind]), shape, start)
            for (kind, start), (dtype, shape) in zip(places, wanted, strict=True)
        ]
        self._matrices.append(segments)
        return segments

    def _segment(self, dtype: np.dtype[Any], shape: tuple[int, ...], start: int) -> NDArray[Any]:
        size = math.prod(shape) * dtype.itemsize
        return self._memory[start : start + size].view(dtype).reshape(shape)

    def add(self, segments: Sequence[NDArray[Any]]) -> None:
        """Remember the segments of a matrix that was packed."""
        self._matrices.append(segments)
        self.num_packed += 1

    def write(self) -> threading.Thread | None:
        """Write the file in a thread if matrices were packed, and return the thread.

        The matrices must not change any more. A full or closed folder is no error.
        """
        matrices, self._matrices = self._matrices, []
        if not self.num_packed:
            return None
        thread = threading.Thread(target=self._write, args=(matrices,), name="mie-panels")
        try:
            thread.start()
        except RuntimeError:  # the system starts no more threads
            return None
        return thread

    def _write(self, matrices: Sequence[Sequence[NDArray[Any]]]) -> None:
        total, num_bytes = 0, 0
        described: list[list[tuple[str, int]]] = []
        for segments in matrices:
            described.append([])
            for segment in segments:
                kind = QUANTISED if segment.dtype.names else segment.dtype.name
                described[-1].append((kind, num_bytes))
                total = (total + _sum(segment.reshape(-1).view(np.uint8))) % 2**64
                num_bytes = _aligned(num_bytes + segment.nbytes, _LINE)
        if num_bytes < self._min_bytes:
            return
        description = {"bytes": num_bytes, "sum": total, "matrices": described}
        text = json.dumps(description).encode()
        try:
            folder = open_cache(CACHE)
            if not make_room(folder, num_bytes, self._max_bytes):
                return
            _write_whole(folder / self._name, text, matrices)
        except (OSError, CacheError) as error:
            logger.info("the panels of the model are not kept: %s", error)


def _write_whole(
    path: Path, description: bytes, matrices: Sequence[Sequence[NDArray[Any]]]
) -> None:
    import tempfile  # takes 5 ms, and a full cache is only read

    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with open(handle, "wb", buffering=0) as file:
            head = hashlib.sha256(description).digest() + len(description).to_bytes(8, "little")
            head += description
            file.write(head.ljust(_aligned(len(head), _PAGE), b"\0"))
            for segments in matrices:
                for segment in segments:
                    data = segment.reshape(-1).view(np.uint8)
                    while len(data):  # the system may write less than it gets
                        data = data[file.write(data.data) :]
                    file.write(bytes(-segment.nbytes % _LINE))
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def make_room(folder: Path, num_bytes: int, max_bytes: int) -> bool:
    """Remove the files of a cache that were unused for the longest time, until another one fits.

    Return whether it fits. It does not if the disk has less than `FREE_SHARE` times its bytes.
    """
    free = os.statvfs(folder)
    if num_bytes > max_bytes or num_bytes * FREE_SHARE > free.f_bavail * free.f_frsize:
        logger.info("the panels of the model are not kept: they take %d bytes", num_bytes)
        return False
    files = sorted(((path, path.lstat()) for path in folder.iterdir()), key=_last_use)
    total = sum(about.st_size for _, about in files)
    for path, about in files:
        if total + num_bytes <= max_bytes:
            break
        path.unlink(missing_ok=True)
        total -= about.st_size
    return True


def _last_use(file: tuple[Path, os.stat_result]) -> int:
    return file[1].st_mtime_ns


def _aligned(number: int, size: int) -> int:
    return ceil_div(number, size) * size


def _sum(data: NDArray[np.uint8]) -> int:
    """Return the sum of bytes as words of 64 bits. Zeros may follow the bytes."""
    whole = len(data) // 8 * 8
    rest = int.from_bytes(data[whole:].tobytes(), "little")
    return (int(np.add.reduce(data[:whole].view(np.uint64))) + rest) % 2**64
