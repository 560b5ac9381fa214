"""Name blocks by everything that their bytes depend on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b

KEY_BYTES = 16
"""Bytes of a key. Two paths of tokens share a key with a chance of 2**-64 after 2**32 paths."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything that the bytes of a block depend on, except the salt and the tokens."""

    weights: str
    """Digest of the weights and of the configuration of the model."""
    numerics: str
    """Backend, version of its numerics, and class of the CPU or GPU."""
    cache_dtype: str
    activations: str
    block_size: int
    """Number of tokens of a block."""
    block_bytes: int
    """Bytes of a block."""
    parts: str
    """The layout of layers with a window, the size of a recurrent state, and the ranks."""

    @cached_property
    def digest(self) -> str:
        """The name of the folder with the blocks: 32 hexadecimal digits."""
        text = json.dumps(asdict(self), sort_keys=True)
        return blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()

    def root(self, salt: str | None) -> bytes:
        """Return the key of the empty path. Paths of another salt have other keys."""
        text = json.dumps([self.digest, salt])
        return blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def child(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of the block with these tokens after the path of ``parent``."""
    text = ",".join(map(str, token_ids))
    return blake2b(text.encode(), digest_size=KEY_BYTES, key=parent).digest()
