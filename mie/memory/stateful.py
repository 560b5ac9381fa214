"""Manage the blocks and the state slots of models with recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mie.memory.manager import KVCacheManager
from mie.memory.prefix import Node
from mie.memory.states import StateSlots
from mie.memory.table import BlockTable, HostTable, Moves, Owner


class StatefulManager(KVCacheManager):
    """A `KVCacheManager` whose tables have a state slot each.

    At most ``num_states`` tables may be open. After `open_table`, `StateSlots.open` gives the table
    its slot.
    """

    states: StateSlots

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_states: int,
        num_host_states: int = 0,
        snapshot_distance: int | None = None,
        **options: Any,
    ) -> None:
        self._num_states, self._num_host_states = num_states, num_host_states
        self._snapshot_distance = snapshot_distance
        # A state is at the end of a full block, never inside one.
        super().__init__(num_blocks, block_size, **{**options, "partial_block_sharing": False})

    def reset(self) -> None:
        super().reset()
        self.states = StateSlots(
            self._num_states,
            self.block_size,
            self._prefix,
            self.stats,
            self._emit,
            takes_snapshots=self.shares_full,
            num_host_slots=self._num_host_states,
            distance=self._snapshot_distance,
        )

    def _usable(self, path: list[Node], host: HostTable | None) -> list[Node]:
        return self.states.hit(path, host)

    def fork(
        self, table: BlockTable, owner: Owner, row: int, token_ids: Sequence[int]
    ) -> BlockTable:
        twin = super().fork(table, owner, row, token_ids)
        self.states.fork(table, twin)
        return twin

    def _publish(self, table: BlockTable) -> None:
        super()._publish(table)
        if self.shares_full:
            self.states.reach(table)

    def close_table(self, table: BlockTable) -> None:
        self.states.close(table)
        super().close_table(table)

    def swap_out(self, table: BlockTable) -> HostTable | None:
        host = super().swap_out(table) if self.states.can_export else None
        if host is not None:
            self.states.export(table, host)
        return host

    def drop_host(self, host: HostTable) -> None:
        self.states.drop(host)
        super().drop_host(host)

    def take_moves(self) -> Moves:
        moves = super().take_moves()
        moves.states = self.states.take_moves()
        return moves

    def end_step(self) -> None:
        super().end_step()
        self.states.end_step()

    def abandon_step(self) -> None:
        self.states.abandon_step()
        super().abandon_step()

    def _drop(self, node: Node) -> None:
        self.states.forget(node)
        super()._drop(node)
