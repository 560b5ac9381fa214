"""Random weights in the place of a checkpoint, for models of which there is a config.json alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.model.config import ModelConfig
from mie.model.safetensors_header import TensorEntry
from mie.model.tensors import expected_tensors
from mie.model.weights import Checkpoint

_DTYPES: Mapping[str, tuple[str, DTypeLike]] = {
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
}
"""Of config.json; everything else is float32."""

_BLOCK_ROWS = 1024


class RandomWeights(Checkpoint):
    """A checkpoint whose tensors are drawn when they are read, always to the same numbers.

    The numbers of a tensor depend on the seed and on its name. Norms are 1, biases 0, and matrices
    have a variance of 1 / inputs, so that activations stay finite in any depth.
    """

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        """Draw nothing yet."""
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
        """The whole tensor."""
        return np.concatenate(list(self.blocks(name)))

    def blocks(self, name: str, max_bytes: int = 0) -> Iterator[NDArray[Any]]:
        """The tensor in blocks of rows; ``max_bytes`` has no influence, so that nothing has."""
        shape = self._entries[name].shape
        generator = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        for start in range(0, shape[0], _BLOCK_ROWS):
            size = (min(_BLOCK_ROWS, shape[0] - start), *shape[1:])
            yield self._draw(name, size, generator).astype(self._dtype)

    def release(self, name: str) -> None:
        """Nothing is kept."""

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
