"""Keep the states of recurrent layers in slots, beside the blocks of layers that attend.

A state cannot be cut back to a prefix. So a prefix hit needs a snapshot: the state after exactly
the tokens on the path to a node of the prefix tree. docs/recurrent.md has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mie.memory.manager import KVCacheManager
from mie.memory.pool import BlockPool
from mie.memory.prefix import Allocation, Node, block_of, num_common
from mie.memory.table import BlockTable, HostTable, Moves, Owner


@dataclass(slots=True, eq=False)
class State:
    """The state of the sequence of an open table."""

    slot: int
    pinned: Sequence[int]
    """The positions of the prompt after which a snapshot stays."""
    stops: list[int]
    """The next positions, ascending, where a chunk must end. After these, each block's end."""
    latest: Node | None = None
    """The node of the latest snapshot, unless that snapshot stays. The next one replaces it."""
    kept: int | None = None
    """The slot with the state before a step with drafts, during the step."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state after the tokens on the path to a node."""

    slot: int
    replaced_by: Owner | None
    """The sequence that drops the snapshot when it takes the next one. None if it stays."""
    base: float
    """The value of the last evicted snapshot when this one was last used."""


class States:
    """Manages slots, each free, the state of an open table, or a snapshot of a node.

    An open table always finds a slot, because at most ``num_states`` tables may be open and any
    snapshot may be evicted. A snapshot is taken only if a slot is left.

    A snapshot is worth the tokens that it saves: those after the nearest snapshot above it. The
    snapshot of least worth, counted from the worth of the last evicted snapshot, is evicted first
    (GreedyDual: Cao and Irani, 1997). A snapshot with a single continuation counts half, because
    the next request probably also begins with the continuation. All states have the same size.
    """

    name = "states"

    def __init__(
        self, num_states: int, *, num_host_states: int = 0, snapshot_distance: int | None = None
    ) -> None:
        """With a distance, prompts also leave snapshots that many blocks before their ends."""
        self.num_states, self.num_host_states = num_states, num_host_states
        self._distance = snapshot_distance

    def reset(self, manager: KVCacheManager) -> None:
        """Begin with free slots."""
        self._manager = manager
        manager.prefix.on_evict.append(self.forget)
        self.states: dict[BlockTable, State] = {}
        """The states of open tables."""
        self.snapshots: dict[Node, Snapshot] = {}
        """The snapshots, the least recently used first."""
        self._free_slots = [*reversed(range(self.num_states))]
        self.host_pool = BlockPool(self.num_host_states)
        """The slots on the host."""
        self._clock = 0.0
        # The content that a slot will have after the moves, as the slot that has it before them.
        self._copies: dict[int, int] = {}
        self._unsure: dict[Node, None] = {}  # snapshots without a certain copy
        self._moves = Moves()

    # Opening.

    def usable(self, path: list[Node], host: HostTable | None) -> list[Node]:
        """Return the part of a path that ends at a snapshot, or where the state on the host is."""
        on_host = host.num_tokens // self._manager.block_size if host else 0
        ends = range(len(path), on_host, -1)
        end = next((end for end in ends if path[end - 1] in self.snapshots), on_host)
        return path[:end]

    def reserve(self, table: BlockTable, allocation: Allocation) -> None:
        """Mark the snapshot that the table begins with as the most recently used."""
        if allocation.path and not allocation.is_imported:
            self._use(allocation.path[-1])

    def open(self, table: BlockTable, allocation: Allocation, notes: dict[str, list[int]]) -> None:
        """Give a table its slot, and fill it.

        The note has the positions of the snapshots that stay for the request: the end of the
        prompt, and the place where it departs from the tokens of earlier requests. It is written
        when the first table of the request is opened.
        """
        pinned = notes.setdefault(self.name, [])
        is_new, path, host = not pinned, allocation.path, allocation.host
        size, num_computed = self._manager.block_size, allocation.num_computed
        stops: set[int] = set()
        if self._manager.shares_full:
            pinned += sorted(self._places(allocation)) if is_new else ()
            stops = {*pinned, (len(allocation.token_ids) - 1) // size * size}
        source = None
        if path and not allocation.is_imported:
            source = self.content(self.snapshots[path[-1]].slot)
        slot = self._take_slot()
        state = State(slot, pinned, sorted(stop for stop in stops if stop > num_computed))
        if source is not None:
            self._copies[slot] = source
        elif host is not None:
            self._moves.imports.append((self.host_slot(host), slot))
        if not is_new:  # the sequence was preempted before
            own = (node for node, each in self.snapshots.items() if each.replaced_by == table.owner)
            state.latest = next(own, None)
        self._begin(table, state)

    def _places(self, allocation: Allocation) -> set[int]:
        """Return the positions of a new request's snapshots that stay."""
        size, known = self._manager.block_size, self._num_known(allocation)
        end, back = (len(allocation.token_ids) - 1) // size, self._distance
        places = {known, end * size}
        while back is not None and (end - back) * size > known:
            places.add((end - back) * size)
            back *= 4
        return places

    def _num_known(self, allocation: Allocation) -> int:
        """Return how many tokens are in full blocks of the cache or of an open table's prompt."""
        token_ids, salt, size = allocation.token_ids, allocation.salt, self._manager.block_size
        limit = len(token_ids) - 1
        longest = len(self._manager.prefix.match(token_ids, limit, salt)) * size
        for other, state in self.states.items():
            if other.node and other.node.salt == salt:
                end = min(limit, state.pinned[-1])
                longest = max(longest, num_common(other.token_ids[:end], token_ids[:end]))
        return longest // size * size

    def fork(self, parent: BlockTable, table: BlockTable) -> None:
        """Copy the state to another slot."""
        state, slot = self.states[parent], self._take_slot()
        self._copies[slot] = self.content(state.slot)
        self._begin(table, State(slot, state.pinned, [*state.stops], state.latest))

    def _begin(self, table: BlockTable, state: State) -> None:
        self.states[table] = state
        self._moves.updates.append((table.row, 0, (state.slot,)))
        self._manager.emit(("state", table.owner, state.slot))

    # Running.

    def limit(self, table: BlockTable, count: int) -> int:
        """Return how many of the next ``count`` tokens may be computed before a snapshot."""
        if not self._manager.shares_full:
            return count
        stops, size = self.states[table].stops, self._manager.block_size
        stop = stops[0] if stops else (table.num_tokens // size + 1) * size
        return min(count, stop - table.num_tokens)

    def keep(self, table: BlockTable) -> bool:
        """Copy the state to a free slot before a step with drafts."""
        if not self._free_slots:
            return False
        state = self.states[table]
        state.kept = self._free_slots.pop()
        self._copies[state.kept] = self.content(state.slot)
        return True

    def settle(self, table: BlockTable, *, is_whole: bool) -> bool:
        """Return to the state before the step, unless all of the step's tokens are kept."""
        state = self.states[table]
        unused, state.kept = state.kept, None
        assert unused is not None, "no state was kept"
        if not is_whole:
            unused, state.slot = state.slot, unused
            self._moves.updates.append((table.row, 0, (state.slot,)))
            self._manager.emit(("revert", table.owner, state.slot))
        self._free_slot(unused)
        return is_whole

    def commit(self, table: BlockTable) -> None:
        """Take a snapshot if one is due after the stored tokens. Their blocks are published."""
        position = table.num_tokens
        if position % self._manager.block_size or not self._manager.shares_full:
            return
        state = self.states[table]
        if state.stops:
            if position < state.stops[0]:
                return
            assert state.stops[0] == position, "a chunk passed a stop"
            del state.stops[0]
        node = table.node
        assert node is not None
        self._leave_latest(table)
        if node in self.snapshots:
            snapshot = self._use(node)
        elif self._free_slots or self.snapshots:
            snapshot = self._save(node, table)
        else:
            return
        if position in state.pinned:
            snapshot.replaced_by = None
        if snapshot.replaced_by is not None:
            state.latest = node

    def _leave_latest(self, table: BlockTable) -> None:
        """Drop the latest snapshot of a sequence, unless another sequence has it as well."""
        state = self.states[table]
        node, state.latest = state.latest, None
        if node is None or self.snapshots[node].replaced_by != table.owner:
            return
        others = (other.owner for other, each in self.states.items() if each.latest is node)
        owner = self.snapshots[node].replaced_by = next(others, None)
        if owner is None:
            self.forget(node)

    def _save(self, node: Node, table: BlockTable) -> Snapshot:
        """Take a snapshot of a table's state."""
        slot = self._take_slot()
        self.snapshots[node] = snapshot = Snapshot(slot, table.owner, self._clock)
        self._unsure[node] = None
        self._copies[slot] = self.content(self.states[table].slot)
        self._manager.stats.num_snapshots += 1
        self._manager.emit(("save", block_of(node), slot))
        return snapshot

    def forget(self, node: Node) -> None:
        """Drop the snapshot of a node, if it has one."""
        snapshot = self.snapshots.pop(node, None)
        if snapshot is None:
            return
        for state in self.states.values():
            if state.latest is node:
                state.latest = None
        self._unsure.pop(node, None)
        self._free_slot(snapshot.slot)
        self._manager.emit(("forget", block_of(node)))

    # Leaving and swapping.

    def close(self, table: BlockTable) -> None:
        """Release the slot. The latest snapshot remains, even if another sequence has it."""
        state = self.states.pop(table)
        if table.host is not None:
            self._moves.exports.append((self.content(state.slot), self.receive(table.host)))
        if state.latest is not None:
            self._use(state.latest).replaced_by = table.owner
        self._free_slot(state.slot)
        if state.kept is not None:
            self._free_slot(state.kept)

    def stored(self, table: BlockTable) -> list[int] | None:
        """Return no blocks, or None if no slot is free on the host."""
        return [] if self.host_pool.num_free else None

    def receive(self, host: HostTable) -> int:
        """Take a slot on the host for the state of a sequence, and return it. One must be free."""
        slot = self.host_pool.take()
        host.slots.append((self.host_pool, slot))
        self._manager.emit(("save_host", host.owner, slot))
        return slot

    def host_slot(self, host: HostTable) -> int:
        """Return the slot on the host that has the state of a swapped-out sequence."""
        return next(slot for pool, slot in host.slots if pool is self.host_pool)

    # A step.

    def take_moves(self) -> Moves:
        """Return the moves of states.

        ``updates`` has the slots of rows. All sources of ``copies`` are read before any target is
        written, and ``imports`` come last.
        """
        moves, self._moves = self._moves, Moves()
        moves.copies = [(s, target) for target, s in self._copies.items() if s != target]
        self._copies = {}
        return moves

    def end_step(self, *, has_moved: bool) -> None:
        """Drop the snapshots without a certain copy."""
        if not has_moved:
            self._moves, self._copies = Moves(), {}
            for node in [*self._unsure]:
                self.forget(node)
        self._unsure.clear()

    # Slots.

    @property
    def slots_by_use(self) -> dict[str, int]:
        """The numbers of slots of open tables, of slots of snapshots, and of free slots."""
        counts = {"running": len(self.states), "snapshot": len(self.snapshots)}
        return {**counts, "free": len(self._free_slots)}

    def content(self, slot: int) -> int:
        """Return the slot with the present state that ``slot`` will hold after the moves."""
        return self._copies.get(slot, slot)

    def _use(self, node: Node) -> Snapshot:
        """Mark a snapshot as the most recently used."""
        self.snapshots[node] = snapshot = self.snapshots.pop(node)
        snapshot.base = self._clock
        return snapshot

    def _take_slot(self) -> int:
        """Return a free slot. A snapshot may be evicted for it."""
        if not self._free_slots:
            node = min(self.snapshots, key=self._value)
            self._clock = max(self._clock, self._value(node))
            self._manager.stats.num_snapshot_evictions += 1
            self.forget(node)
        return self._free_slots.pop()

    def _value(self, node: Node) -> float:
        above, num_blocks = node.parent, 1
        while above is not None and above.parent is not None and above not in self.snapshots:
            above, num_blocks = above.parent, num_blocks + 1
        value = self.snapshots[node].base + num_blocks * self._manager.block_size
        return value / 2 if len(node.children) == 1 else value

    def _free_slot(self, slot: int) -> None:
        self._copies.pop(slot, None)
        self._free_slots.append(slot)
