"""Manage the blocks of models with recurrent layers, and the slots of their states.

A state cannot be cut back to a prefix. So a prefix hit needs a snapshot, which is the state after
exactly the tokens on the path to a node of the prefix tree. docs/recurrent.md has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mie.memory.manager import KVCacheManager
from mie.memory.prefix import Node, Room, block_of, num_common
from mie.memory.table import BlockTable, HostTable, Moves, Owner, StateMoves


@dataclass(slots=True, eq=False)
class Running:
    """The state of the sequence of an open table."""

    slot: int
    kept: Sequence[int]
    """The positions of its prompt after which a snapshot stays."""
    stops: list[int]
    """The next positions, ascending, where a chunk must end. After these, each block's end."""
    tail: Node | None = None
    """The node of its latest snapshot, which is dropped when the next one is taken."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state after the tokens on the path to a node."""

    slot: int
    tail_of: Owner | None
    """The sequence that drops it at its next snapshot. None if it stays."""
    base: float
    """The value of the last evicted snapshot when this one was last used."""


class StatefulManager(KVCacheManager):
    """Also manages slots, each free, the state of an open table, or a snapshot of a node.

    An open table always finds a slot, because at most ``num_states`` tables may be open and any
    snapshot may be evicted. A snapshot is taken only if a slot is left.

    A snapshot is worth the tokens that it saves: those after the nearest snapshot above it. The
    one that is worth least, counted from the worth of the last evicted one, is evicted first
    (GreedyDual: Cao and Irani, 1997). One with a single continuation counts half, because the next
    request probably begins with the continuation, too. All states have the same size.
    """

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
        """With a distance, prompts leave snapshots that many blocks before their ends, too."""
        self.num_states, self.num_host_states = num_states, num_host_states
        self._distance = snapshot_distance
        # A state is at the end of a full block, never inside one.
        super().__init__(num_blocks, block_size, **{**options, "partial_block_sharing": False})

    def reset(self) -> None:
        super().reset()
        self.snapshots: dict[Node, Snapshot] = {}
        """The snapshots, the least recently used first."""
        self._states: dict[BlockTable, Running] = {}
        self._host_slots: dict[HostTable, int] = {}
        self._free_slots = [*reversed(range(self.num_states))]
        self._free_host_slots = [*reversed(range(self.num_host_states))]
        self._clock = 0.0
        # The content that a slot will have after the moves, as the slot that has it before them.
        self._copies: dict[int, int] = {}
        self._unsure: set[Node] = set()  # snapshots whose copies have not surely been made
        self._state_moves = StateMoves()

    # Opening.

    def _usable(self, path: list[Node], host: HostTable | None) -> list[Node]:
        """Return the part of a path that ends at a snapshot, or where the state on the host is."""
        on_host = host.num_tokens // self.block_size if host else 0
        ends = range(len(path), on_host, -1)
        end = next((end for end in ends if path[end - 1] in self.snapshots), on_host)
        return path[:end]

    def open_state(self, table: BlockTable, room: Room, kept: list[int]) -> None:
        """Give a table its slot, and fill it.

        ``kept`` has the positions after which the snapshots of its request stay. It is filled when
        the first of them is opened: with the end of the prompt, and with the place where a later
        request leaves the tokens of earlier ones.
        """
        is_new, path, host = not kept, room.path, room.host
        size, num_computed = self.block_size, room.num_computed
        stops: set[int] = set()
        if self.shares_full:
            kept += sorted(self._places(room)) if is_new else ()
            stops = {*kept, (len(room.token_ids) - 1) // size * size}
        source = None
        if path and not (host and host.num_tokens == num_computed):
            source = self._content(self._use(path[-1]).slot)
        slot = self._take_slot()
        stops = {stop for stop in stops if stop > num_computed}
        running = Running(slot, kept, sorted(stops))
        if source is not None:
            self._copies[slot] = source
        if not is_new:  # it was preempted
            own = (node for node, each in self.snapshots.items() if each.tail_of == table.owner)
            running.tail = next(own, None)
        if host is not None:
            host_slot = self._free_host_slot(host)
            if source is None:
                self._state_moves.imports.append((host_slot, slot))
        self._begin(table, running)

    def _places(self, room: Room) -> set[int]:
        """Return the positions after which a new request's snapshots stay."""
        known, end = self._num_known(room), (len(room.token_ids) - 1) // self.block_size
        places, back = {known, end * self.block_size}, self._distance
        while back is not None and (end - back) * self.block_size > known:
            places.add((end - back) * self.block_size)
            back *= 4
        return places

    def _num_known(self, room: Room) -> int:
        """Return how many tokens are in full blocks of the cache or of an open table's prompt."""
        limit, size = len(room.token_ids) - 1, self.block_size
        longest = len(self._prefix.match(room.token_ids, limit, room.salt)) * size
        for other, running in self._states.items():
            if other.node and other.node.salt == room.salt:
                end = min(limit, running.kept[-1])
                longest = max(longest, num_common(other.token_ids[:end], room.token_ids[:end]))
        return longest // size * size

    def fork(
        self, table: BlockTable, owner: Owner, row: int, token_ids: Sequence[int]
    ) -> BlockTable:
        twin = super().fork(table, owner, row, token_ids)
        running, slot = self._states[table], self._take_slot()
        self._copies[slot] = self._content(running.slot)
        stops = [*running.stops]
        self._begin(twin, Running(slot, running.kept, stops, running.tail))
        return twin

    def _begin(self, table: BlockTable, running: Running) -> None:
        self._states[table] = running
        self._state_moves.rows.append((table.row, running.slot))
        self._emit(("state", table.owner, running.slot))

    # Running.

    def chunk_limit(self, table: BlockTable, count: int) -> int:
        """Return how many of the next ``count`` tokens may be computed before a snapshot."""
        if not self.shares_full:
            return count
        stops, size = self._states[table].stops, self.block_size
        stop = stops[0] if stops else (table.num_tokens // size + 1) * size
        return min(count, stop - table.num_tokens)

    def _publish(self, table: BlockTable) -> None:
        super()._publish(table)
        if self.shares_full:
            self._reach(table)

    def _reach(self, table: BlockTable) -> None:
        """Take a snapshot if one is due after the stored tokens, whose blocks are published."""
        running, position = self._states[table], table.num_tokens
        if position % self.block_size or (running.stops and position < running.stops[0]):
            return
        if running.stops:
            assert running.stops[0] == position, "a chunk passed a stop"
            del running.stops[0]
        node = table.node
        assert node is not None
        self._leave_tail(table)
        if node in self.snapshots:
            snapshot = self._use(node)
        elif self._free_slots or self.snapshots:
            snapshot = self._save(node, table)
        else:
            return
        if position in running.kept:
            snapshot.tail_of = None
        if snapshot.tail_of is not None:
            running.tail = node

    def _leave_tail(self, table: BlockTable) -> None:
        """Drop the latest snapshot of a sequence, unless it is another's, too."""
        running = self._states[table]
        node, running.tail = running.tail, None
        if node is None or self.snapshots[node].tail_of != table.owner:
            return
        heirs = [other for other, its in self._states.items() if its.tail is node]
        if heirs:
            self.snapshots[node].tail_of = heirs[0].owner
        else:
            self._forget(node)

    def _save(self, node: Node, table: BlockTable) -> Snapshot:
        """Take a snapshot of a table's state."""
        slot = self._take_slot()
        self.snapshots[node] = snapshot = Snapshot(slot, table.owner, self._clock)
        self._unsure.add(node)
        self._copies[slot] = self._content(self._states[table].slot)
        self.stats.num_snapshots += 1
        self._emit(("save", block_of(node), slot))
        return snapshot

    def _drop(self, node: Node) -> None:
        self._forget(node)
        super()._drop(node)

    def _forget(self, node: Node) -> None:
        """Drop the snapshot of a node, if it has one."""
        snapshot = self.snapshots.pop(node, None)
        if snapshot is None:
            return
        for running in self._states.values():
            if running.tail is node:
                running.tail = None
        self._unsure.discard(node)
        self._free_slot(snapshot.slot)
        self._emit(("forget", block_of(node)))

    # Leaving and swapping.

    def close_table(self, table: BlockTable) -> None:
        """Release the slot, too. The latest snapshot remains, even if another has it too."""
        running = self._states.pop(table)
        if running.tail is not None:
            self._use(running.tail).tail_of = table.owner
        self._free_slot(running.slot)
        super().close_table(table)

    def swap_out(self, table: BlockTable) -> HostTable | None:
        host = super().swap_out(table) if self._free_host_slots else None
        if host is not None:
            self._host_slots[host] = slot = self._free_host_slots.pop()
            self._state_moves.exports.append((self._content(self._states[table].slot), slot))
            self._emit(("save_host", table.owner, slot))
        return host

    def drop_host(self, host: HostTable) -> None:
        self._free_host_slot(host)
        super().drop_host(host)

    def _free_host_slot(self, host: HostTable) -> int:
        """Release the host's slot of a swapped-out sequence, and return it."""
        slot = self._host_slots.pop(host)
        self._free_host_slots.append(slot)
        return slot

    # A step.

    def take_moves(self) -> Moves:
        moves = super().take_moves()
        moves.states, self._state_moves = self._state_moves, StateMoves()
        moves.states.copies = [(s, target) for target, s in self._copies.items() if s != target]
        self._copies = {}
        return moves

    def end_step(self, *, has_moved: bool = True) -> None:
        """Also drop the snapshots whose copies may not have been made."""
        if not has_moved:
            for node in [*self._unsure]:
                self._forget(node)
        self._unsure.clear()
        super().end_step(has_moved=has_moved)

    # Slots.

    @property
    def slots_by_use(self) -> dict[str, int]:
        """The number of slots of open tables, of snapshots, and of those that are free."""
        counts = {"running": len(self._states), "snapshot": len(self.snapshots)}
        return {**counts, "free": len(self._free_slots)}

    def _content(self, slot: int) -> int:
        """Return the slot whose present state ``slot`` will hold after the moves."""
        return self._copies.get(slot, slot)

    def _use(self, node: Node) -> Snapshot:
        """Mark a snapshot as the most recently used."""
        self.snapshots[node] = snapshot = self.snapshots.pop(node)
        snapshot.base = self._clock
        return snapshot

    def _take_slot(self) -> int:
        """Return a free slot, for which a snapshot may be evicted."""
        if not self._free_slots:
            node = min(self.snapshots, key=self._value)
            self._clock = max(self._clock, self._value(node))
            self.stats.num_snapshot_evictions += 1
            self._forget(node)
        return self._free_slots.pop()

    def _value(self, node: Node) -> float:
        above, num_blocks = node.parent, 1
        while above is not None and above.parent is not None and above not in self.snapshots:
            above, num_blocks = above.parent, num_blocks + 1
        value = self.snapshots[node].base + num_blocks * self.block_size
        return value / 2 if len(node.children) == 1 else value

    def _free_slot(self, slot: int) -> None:
        self._copies.pop(slot, None)
        self._free_slots.append(slot)
