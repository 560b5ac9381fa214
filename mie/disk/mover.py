"""Copy blocks and states between the caches of an engine and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mie.ops.backend import Array, Backend


@dataclass(frozen=True, kw_only=True, eq=False)
class Mover:
    """The caches of a runner."""

    backend: Backend
    kv_cache: Array
    states: Array
    """The states of recurrent layers, or None."""
    host_blocks: dict[int, bytes]
    """Contents that replace blocks on the host, by block."""
    host_states: dict[int, bytes]
    """The states on the host, by slot."""

    def export_blocks(self, block_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of blocks of the KV cache."""
        return self.backend.export_blocks(self.kv_cache, block_ids)

    def export_state(self, slot: int) -> bytes:
        """Return the bytes of the states of a slot."""
        data: bytes = self.backend.recurrent.export_state(self.states, slot)
        return data
