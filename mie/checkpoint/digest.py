"""Tell the weights of one model directory from those of another, without reading all of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from mie.checkpoint.safetensors_header import TensorEntry
from mie.checkpoint.weights import read_entries
from mie.errors import WeightsError
from mie.system.files import open_file

SAMPLE_BYTES = 256


def weights_digest(directory: Path) -> str:
    """Return a digest of the name, the type, the shape and some bytes of each tensor.

    Training changes all tensors, so some bytes of each tell the results apart. The digest does not
    depend on how the tensors are spread over files.

    Raises:
        WeightsError: the weights cannot be read.
    """
    entries = read_entries(directory)
    digests: dict[str, bytes] = {}
    for path in {entry.path for entry in entries.values()}:
        try:
            with open_file(path) as file:
                for name, entry in entries.items():
                    if entry.path == path:
                        digests[name] = _digest(name, entry, file)
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def _digest(name: str, entry: TensorEntry, file: BinaryIO) -> bytes:
    found = hashlib.sha256(f"{name}\0{entry.dtype}\0{entry.shape}\0".encode())
    size = min(SAMPLE_BYTES, entry.nbytes)
    for place in (entry.start, entry.start + (entry.nbytes - size) // 2, entry.stop - size):
        file.seek(place)
        found.update(file.read(size))
    return found.digest()
