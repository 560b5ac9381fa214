"""Connect the prefix cache of an engine with a store of blocks.

The tier reads the records of the memory. A block that enters the prefix tree is written after the
step. Before a step, the blocks of the requests that wait are read to the host, as if the requests
had been swapped out. So the scheduler and the memory treat them like any swapped-out sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, Protocol

from mie.disk.identity import KEY_BYTES, child
from mie.disk.mover import Mover
from mie.disk.segment import Block
from mie.memory.layers.states import States
from mie.memory.layers.windows import Windows
from mie.memory.table import HostTable
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import Sequence as Seq

WORTH_READING = 4
"""A path is read if at most so many blocks are read for each block that need not be computed."""


class Store(Protocol):
    """Keeps contents by their keys: `BlockStore`, or a check of one."""

    @property
    def identity(self) -> Any:
        """Everything that the bytes depend on. It has the keys of roots."""

    @property
    def is_writing(self) -> bool:
        """Whether contents are written."""

    def has(self, key: bytes) -> bool:
        """Return whether a content need not be written."""

    def has_written(self, key: bytes) -> bool:
        """Return whether a content can be read."""

    def write(self, block: Block) -> None:
        """Write a content."""

    def find(self, token_ids: Sequence[int], salt: str | None, limit: int) -> list[bytes]:
        """Return the keys of the longest path of full blocks of at most ``limit`` tokens."""

    def read(self, key: bytes) -> bytes | None:
        """Return a content, or None if it is damaged or gone."""

    def close(self) -> None:
        """Write the contents that wait to be written."""


class Node(NamedTuple):
    """A node of the prefix tree."""

    key: bytes
    parent: bytes
    token_ids: tuple[int, ...]


BLOCK, WINDOW, STATE = "block", "window", "state"
"""The contents of a node of the prefix tree.

The layers that see all positions have a block, layers with a window have others, and recurrent
layers have a state.
"""


def name_of(key: bytes, part: str) -> bytes:
    """Return the key of a content. A block has the key of the node."""
    return key if part == BLOCK else blake2b(part.encode(), digest_size=KEY_BYTES, key=key).digest()


class DiskTier:
    """Writes the blocks of the prefix tree to a store, and reads blocks for waiting sequences."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.num_queries = self.num_hits = 0
        """Numbers of tokens looked up in the store and found there. The prefix tree had neither."""
        self._nodes: dict[int, Node] = {}  # by block
        # The contents that are new in this step, by the block of their node.
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._entries: dict[int, tuple[int, ...]] = {}
        self._snapshots: dict[int, int] = {}
        self._looked_up: set[tuple[int, int]] = set()
        self._tree: object = None

    def connect(self, scheduler: Scheduler, mover: Mover) -> None:
        """Set the scheduler and the runner, before the first step."""
        self._scheduler, self._manager, self._mover = scheduler, scheduler.manager, mover
        self._windows, self._states = self._manager.part(Windows), self._manager.part(States)

    def close(self) -> None:
        """Write the blocks that wait to be written."""
        self.store.close()

    # The records of the memory.

    def emit(self, record: tuple[Any, ...]) -> None:
        """Note the contents that enter and leave the prefix tree."""
        kind, values = record[0], record[1:]
        if kind == "seal":
            block_id, parent, salt, tokens = values
            above = self.store.identity.root(salt) if parent is None else self._nodes[parent].key
            self._nodes[block_id] = Node(child(above, tokens), above, tokens)
            self._blocks[block_id] = (block_id,)
        elif kind == "evict":
            del self._nodes[values[0]]
            self._blocks.pop(values[0], None)
        elif kind == "seal_window":
            self._entries[values[0]] = values[1]
        elif kind == "evict_window":
            self._entries.pop(values[0], None)
        elif kind == "save":
            self._snapshots[values[0]] = values[1]
        elif kind == "forget":
            self._snapshots.pop(values[0], None)

    # Writing.

    def after_step(self, _: object = None) -> None:
        """Give the new contents of the prefix tree to the store."""
        blocks, self._blocks = self._blocks, {}
        entries, self._entries = self._entries, {}
        if self.store.is_writing:
            self._write(blocks)
            self._write(entries, WINDOW)
            self._write_states()

    def _write(self, contents: Mapping[int, Sequence[int]], part: str = BLOCK) -> None:
        new = {self._name(block_id, part): block_id for block_id in contents}
        new = {name: block_id for name, block_id in new.items() if not self.store.has(name)}
        block_ids = [each for block_id in new.values() for each in contents[block_id]]
        exported = iter(self._mover.export_blocks(block_ids))
        for name, block_id in new.items():
            data = b"".join(islice(exported, len(contents[block_id])))
            self._put(name, part, block_id, data)

    def _write_states(self) -> None:
        """Write the snapshots with contents that were copied to their slots."""
        for block_id, slot in [*self._snapshots.items()]:
            if self._states is not None and self._states.content(slot) == slot:
                del self._snapshots[block_id]
                name = self._name(block_id, STATE)
                if not self.store.has(name):
                    self._put(name, STATE, block_id, self._mover.export_state(slot))

    def _name(self, block_id: int, part: str) -> bytes:
        return name_of(self._nodes[block_id].key, part)

    def _put(self, name: bytes, part: str, block_id: int, data: bytes) -> None:
        node = self._nodes[block_id]
        self.store.write(Block(name, part, node.parent, node.token_ids, data))

    # Reading.

    def before_step(self) -> None:
        """Read the blocks of the sequences that may be admitted next."""
        if self._manager.prefix is not self._tree:  # the memory has started again
            self._tree = self._manager.prefix
            for notes in (self._nodes, self._blocks, self._entries, self._snapshots):
                notes.clear()
        waiting = self._scheduler.waiting
        if not waiting:
            return
        num_free = self._scheduler.config.max_num_seqs - len(self._scheduler.running)
        candidates = [*islice(waiting, num_free)]
        self._looked_up &= {seq.seq_id for seq in candidates}
        for seq in candidates:
            if seq.host is None and seq.may_read_cache and seq.seq_id not in self._looked_up:
                self._looked_up.add(seq.seq_id)
                seq.host = self._read(seq)

    def _read(self, seq: Seq) -> HostTable | None:
        """Read the path of a sequence to the host, if that saves enough work."""
        size, salt, limit = self._manager.block_size, seq.request.cache_salt, len(seq.token_ids) - 1
        num_cached = len(self._manager.prefix.match(seq.token_ids, limit, salt))
        keys = self.store.find(seq.token_ids, salt, limit)
        self.num_queries += (limit // size - num_cached) * size
        while True:
            count = next((n for n in range(len(keys), 0, -1) if self._is_whole(keys[:n])), 0)
            if (count - num_cached) * WORTH_READING <= count:
                return None
            names = [*keys[:count], *self._beside(keys[:count])]
            contents = [self.store.read(name) for name in names]
            data = [content for content in contents if content is not None]
            if len(data) == len(names):
                break
            keys = keys[: next(i for i, content in enumerate(contents) if content is None)]
        host = self._received(seq, count, data)
        self.num_hits += 0 if host is None else (count - num_cached) * size
        return host

    def _is_whole(self, keys: Sequence[bytes]) -> bool:
        return all(map(self.store.has_written, self._beside(keys)))

    def _beside(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys of the contents that a path needs beside its blocks."""
        names = []
        if self._windows is not None:
            first = self._windows.window.reach(len(keys) * self._manager.block_size)
            names += [name_of(key, WINDOW) for key in keys[first:]]
        if self._states is not None:
            names.append(name_of(keys[-1], STATE))
        return names

    def _received(self, seq: Seq, count: int, data: list[bytes]) -> HostTable | None:
        """Put the contents of a path on the host. Return None if the host has no room."""
        manager, states = self._manager, self._states
        state = data.pop() if states is not None else b""
        blocks = data[:count]
        for entry in data[count:]:  # the blocks of the groups of layers with a window
            size = len(blocks[0])
            blocks += [entry[at : at + size] for at in range(0, len(entry), size)]
        if states is not None and not states.host_pool.num_free:
            return None
        host = manager.host.receive(seq.seq_id, len(blocks), count * manager.block_size)
        if host is None:
            return None
        self._mover.host_blocks.update(zip(host.block_ids, blocks, strict=True))
        if states is not None:
            self._mover.host_states[states.receive(host)] = state
        return host
