"""Generate random weights for a model that has only a config.json."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.checkpoint.config import ModelConfig
from mie.checkpoint.safetensors_header import TensorEntry
from mie.checkpoint.tensors import expected_tensors
from mie.checkpoint.weights import Checkpoint

_DTYPES: Mapping[str, tuple[str, DTypeLike]] = {
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
}
"""The dtypes of config.json that are used. Everything else is float32."""

_BLOCK_ROWS = 1024


class RandomWeights(Checkpoint):
    """A checkpoint whose tensors are generated when read, always with the same numbers.

    The numbers of a tensor depend on the seed and on its name. Norms are 1, biases are 0, and
    matrices have a variance of 1 / inputs, so activations stay finite at any depth.
    """

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        """Set the model and the seed. Nothing is generated yet."""
        code, self._dtype = _DTYPES.get(model.dtype, ("F32", np.float32))
        size = np.dtype(self._dtype).itemsize
        self._seed = seed % 2**64
        super().__init__(
            {
                name: TensorEntry(
                    path=Path("random"), dtype=code, shape=shape, start=0, stop=_count(shape) * size
                )
                for name, shape in expected_tensors(model).items()
            }
        )

    def read(self, name: str) -> NDArray[Any]:
        """Return the whole tensor."""
        return np.concatenate(list(self.blocks(name)))

    def blocks(self, name: str, max_bytes: int = 0) -> Iterator[NDArray[Any]]:
        """Yield the tensor in blocks of rows. ``max_bytes`` has no influence on the numbers."""
        shape = self._entries[name].shape
        generator = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        for start in range(0, shape[0], _BLOCK_ROWS):
            size = (min(_BLOCK_ROWS, shape[0] - start), *shape[1:])
            yield self._draw(name, size, generator).astype(self._dtype)

    def release(self, name: str) -> None:
        """Do nothing, because nothing is kept."""

    @staticmethod
    def _draw(name: str, size: tuple[int, ...], generator: np.random.Generator) -> NDArray[Any]:
        if name.endswith("norm.weight"):
            return np.ones(size, np.float32)
        if name.endswith(".bias"):
            return np.zeros(size, np.float32)
        numbers = generator.standard_normal(size, dtype=np.float32)
        numbers /= np.sqrt(np.float32(size[-1]))
        return numbers


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
