"""Manage the slots of recurrent states: those of running sequences, and snapshots.

A state cannot be cut back to a prefix. So a prefix hit needs a snapshot, which is the state after
exactly the tokens on the path to a node of the prefix tree. docs/recurrent.md has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mie.base.stats.memory import MemoryStats
from mie.memory.prefix import Node, PrefixCache, Room, block_of, num_common
from mie.memory.table import BlockTable, Emit, HostTable, Owner


@dataclass(slots=True, eq=False)
class Running:
    """The state of the sequence of an open table."""

    owner: Owner
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


@dataclass(slots=True)
class StateMoves:
    """The changes that a step makes to slots before it computes, in this order."""

    rows: list[tuple[int, int]]
    """(row, slot): the slots of new rows."""
    exports: list[tuple[int, int]]
    """(slot, slot of the host)."""
    copies: list[tuple[int, int]]
    """(source, target). All sources are read before any target is written."""
    imports: list[tuple[int, int]]
    """(slot of the host, slot)."""


class StateSlots:
    """Slots, each free, the state of an open table, or a snapshot of a node of the prefix tree.

    An open table always finds a slot, because at most ``num_slots`` tables may be open and any
    snapshot may be evicted. A snapshot is taken only if a slot is left.

    A snapshot is worth the tokens that it saves: those after the nearest snapshot above it. The
    one that is worth least, counted from the worth of the last evicted one, is evicted first
    (GreedyDual: Cao and Irani, 1997). One with a single continuation counts half, because the next
    request probably begins with the continuation, too. All states have the same size.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        prefix: PrefixCache,
        stats: MemoryStats,
        emit: Emit,
        *,
        takes_snapshots: bool,
        num_host_slots: int,
        distance: int | None,
    ) -> None:
        """With a ``distance``, prompts leave snapshots that many blocks before their ends, too."""
        self.num_slots = num_slots
        self.snapshots: dict[Node, Snapshot] = {}
        """The snapshots, the least recently used first."""
        self._block_size = block_size
        self._prefix = prefix
        self._stats = stats
        self._emit = emit
        self._takes_snapshots = takes_snapshots
        self._distance = distance
        self._tables: dict[BlockTable, Running] = {}
        self._hosts: dict[HostTable, int] = {}
        self._free = [*reversed(range(num_slots))]
        self._free_hosts = [*reversed(range(num_host_slots))]
        self._clock = 0.0
        # The content that a slot will have after the moves, as the slot that has it before them.
        self._copies: dict[int, int] = {}
        self._unsure: set[Node] = set()  # snapshots whose copies have not surely been made
        self._rows: list[tuple[int, int]] = []
        self._exports: list[tuple[int, int]] = []
        self._imports: list[tuple[int, int]] = []

    @property
    def num_running(self) -> int:
        """The number of slots of open tables."""
        return len(self._tables)

    @property
    def can_export(self) -> bool:
        """Whether the host has a slot for another state."""
        return bool(self._free_hosts)

    # Opening.

    def hit(self, path: list[Node], host: HostTable | None) -> list[Node]:
        """Return the part of a path of full blocks whose tokens need not be computed.

        It ends at a snapshot, or where the state on the host is.
        """
        on_host = host.num_tokens // self._block_size if host else 0
        ends = range(len(path), on_host, -1)
        end = next((end for end in ends if path[end - 1] in self.snapshots), on_host)
        return path[:end]

    def open(self, table: BlockTable, room: Room, kept: list[int]) -> None:
        """Give a table its slot, and fill it.

        ``kept`` has the positions after which the snapshots of its request stay. It is filled when
        the first of them is opened: with the end of the prompt, and with the place where a later
        request leaves the tokens of earlier ones.
        """
        is_new, path, host = not kept, room.path, room.host
        size, num_computed = self._block_size, room.num_computed
        stops: set[int] = set()
        if self._takes_snapshots:
            kept += sorted(self._places(room)) if is_new else ()
            stops = {*kept, (len(room.token_ids) - 1) // size * size}
        source = None
        if path and not (host and host.num_tokens == num_computed):
            source = self._content(self._use(path[-1]).slot)
        slot = self._take()
        stops = {stop for stop in stops if stop > num_computed}
        running = Running(table.owner, slot, kept, sorted(stops))
        if source is not None:
            self._copies[slot] = source
        if not is_new:  # it was preempted
            own = (node for node, each in self.snapshots.items() if each.tail_of == table.owner)
            running.tail = next(own, None)
        if host is not None:
            host_slot = self.drop(host)
            if source is None:
                self._imports.append((host_slot, slot))
        self._begin(table, running)

    def _places(self, room: Room) -> set[int]:
        """Return the positions after which a new request's snapshots stay."""
        known, end = self._num_known(room), (len(room.token_ids) - 1) // self._block_size
        places, back = {known, end * self._block_size}, self._distance
        while back is not None and (end - back) * self._block_size > known:
            places.add((end - back) * self._block_size)
            back *= 4
        return places

    def _num_known(self, room: Room) -> int:
        """Return how many tokens are in full blocks of the cache or of an open table's prompt."""
        limit, size = len(room.token_ids) - 1, self._block_size
        longest = len(self._prefix.match(room.token_ids, limit, room.salt)) * size
        for other, running in self._tables.items():
            if other.node and other.node.salt == room.salt:
                end = min(limit, running.kept[-1])
                longest = max(longest, num_common(other.token_ids[:end], room.token_ids[:end]))
        return longest // size * size

    def fork(self, table: BlockTable, twin: BlockTable) -> None:
        """Give a forked table a copy of the state."""
        running, slot = self._tables[table], self._take()
        self._copies[slot] = self._content(running.slot)
        stops = [*running.stops]
        self._begin(twin, Running(twin.owner, slot, running.kept, stops, running.tail))

    def _begin(self, table: BlockTable, running: Running) -> None:
        self._tables[table] = running
        self._rows.append((table.row, running.slot))
        self._emit(("state", table.owner, running.slot))

    def close(self, table: BlockTable) -> None:
        """Release a table's slot. Its latest snapshot remains, even if another has it too."""
        running = self._tables.pop(table)
        if running.tail is not None:
            self._use(running.tail).tail_of = running.owner
        self._release(running.slot)

    # Running.

    def limit(self, table: BlockTable, count: int) -> int:
        """Return how many of the next ``count`` tokens may be computed before a snapshot."""
        if not self._takes_snapshots:
            return count
        stops, size = self._tables[table].stops, self._block_size
        stop = stops[0] if stops else (table.num_tokens // size + 1) * size
        return min(count, stop - table.num_tokens)

    def reach(self, table: BlockTable) -> None:
        """Take a snapshot if one is due after the stored tokens, whose blocks are published."""
        running, position = self._tables[table], table.num_tokens
        if position % self._block_size or (running.stops and position < running.stops[0]):
            return
        if running.stops:
            assert running.stops[0] == position, "a chunk passed a stop"
            del running.stops[0]
        node = table.node
        assert node is not None
        self._leave_tail(running)
        if node in self.snapshots:
            snapshot = self._use(node)
        elif self._free or self.snapshots:
            snapshot = self._add(node, running)
        else:
            return
        if position in running.kept:
            snapshot.tail_of = None
        if snapshot.tail_of is not None:
            running.tail = node

    def _leave_tail(self, running: Running) -> None:
        """Drop the latest snapshot of a sequence, unless it is another's, too."""
        node, running.tail = running.tail, None
        if node is None or self.snapshots[node].tail_of != running.owner:
            return
        heirs = [other for other in self._tables.values() if other.tail is node]
        if heirs:
            self.snapshots[node].tail_of = heirs[0].owner
        else:
            self.forget(node)

    def _add(self, node: Node, running: Running) -> Snapshot:
        """Take a snapshot of a sequence's state."""
        slot = self._take()
        self.snapshots[node] = snapshot = Snapshot(slot, running.owner, self._clock)
        self._unsure.add(node)
        self._copies[slot] = self._content(running.slot)
        self._stats.num_snapshots += 1
        self._emit(("save", block_of(node), slot))
        return snapshot

    def forget(self, node: Node) -> None:
        """Drop the snapshot of a node, if it has one."""
        snapshot = self.snapshots.pop(node, None)
        if snapshot is None:
            return
        for running in self._tables.values():
            if running.tail is node:
                running.tail = None
        self._unsure.discard(node)
        self._release(snapshot.slot)
        self._emit(("forget", block_of(node)))

    # Swapping.

    def export(self, table: BlockTable, host: HostTable) -> None:
        """Copy a table's state to the host."""
        self._hosts[host] = slot = self._free_hosts.pop()
        self._exports.append((self._content(self._tables[table].slot), slot))
        self._emit(("save_host", table.owner, slot))

    def drop(self, host: HostTable) -> int:
        """Release the host's slot of a swapped-out sequence, and return it."""
        slot = self._hosts.pop(host)
        self._free_hosts.append(slot)
        return slot

    # A step.

    def take_moves(self) -> StateMoves:
        """Return the moves that must happen before the step computes. Each is returned once."""
        copies = [(source, target) for target, source in self._copies.items() if source != target]
        moves = StateMoves(self._rows, self._exports, copies, self._imports)
        self._copies, self._rows, self._exports, self._imports = {}, [], [], []
        return moves

    def end_step(self) -> None:
        """Note that the moves are made."""
        self._unsure.clear()

    def abandon_step(self) -> None:
        """Drop the snapshots whose copies may not have been made."""
        for node in [*self._unsure]:
            self.forget(node)

    # Slots.

    def _content(self, slot: int) -> int:
        """Return the slot whose present state ``slot`` will hold after the moves."""
        return self._copies.get(slot, slot)

    def _use(self, node: Node) -> Snapshot:
        """Mark a snapshot as the most recently used."""
        self.snapshots[node] = snapshot = self.snapshots.pop(node)
        snapshot.base = self._clock
        return snapshot

    def _take(self) -> int:
        """Return a free slot, for which a snapshot may be evicted."""
        if not self._free:
            node = min(self.snapshots, key=self._value)
            self._clock = max(self._clock, self._value(node))
            self._stats.num_snapshot_evictions += 1
            self.forget(node)
        return self._free.pop()

    def _value(self, node: Node) -> float:
        above, num_blocks = node.parent, 1
        while above is not None and above.parent is not None and above not in self.snapshots:
            above, num_blocks = above.parent, num_blocks + 1
        value = self.snapshots[node].base + num_blocks * self._block_size
        return value / 2 if len(node.children) == 1 else value

    def _release(self, slot: int) -> None:
        self._copies.pop(slot, None)
        self._free.append(slot)
