"""Connect the prefix cache of an engine with a store of blocks.

The tier reads the records of the memory. A block that enters the prefix tree is written after the
step. Before a step, the blocks of the requests that wait are read to the host, as if the requests
had been swapped out. So the scheduler and the memory treat them like any swapped-out sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, Protocol

from mie.base.stats.step import StepStats
from mie.disk.identity import KEY_BYTES, child
from mie.disk.mover import Mover
from mie.disk.race import Race
from mie.disk.segment import Block
from mie.disk.store import DiskStats
from mie.engine.engine import Engine
from mie.engine.watch.candidates import Candidates
from mie.memory.layers.states import States
from mie.memory.layers.windows import Windows
from mie.memory.table import HostTable
from mie.sched.sequence import Sequence as Seq

MAX_CONTENTS = 256
"""Old contents of each kind that are given to the store after one step, beside the new ones."""


class Store(Protocol):
    """Keeps contents by their keys: `BlockStore`, or a check of one."""

    stats: DiskStats

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

    def size_of(self, key: bytes) -> int:
        """Return the number of bytes of a content that can be read."""

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
    position: int
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

    def __init__(self, store: Store, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` returns monotonic seconds."""
        self.store = store
        self.num_queries = self.num_hits = 0
        """Numbers of tokens looked up in the store and found there. The prefix tree had neither."""
        self.clock, self._race = clock, Race()
        self.num_slow = 0
        """Number of paths that were not read, because computing them was faster."""
        self._slow: set[tuple[int, int]] = set()
        self._nodes: dict[int, Node] = {}  # by block
        # The contents that are new in this step, by the block of their node.
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._entries: dict[int, tuple[int, ...]] = {}
        self._snapshots: dict[int, int] = {}
        self._tree: object = None

    def connect(self, engine: Engine, mover: Mover) -> None:
        """Read blocks before each step of an engine, and write blocks after it."""
        self._candidates = Candidates(engine.scheduler)
        self._manager, self._mover = engine.scheduler.manager, mover
        self._windows, self._states = self._manager.part(Windows), self._manager.part(States)
        engine.before_step.append(self.before_step)
        engine.observers.append(self.after_step)

    def close(self) -> None:
        """Write the blocks that wait to be written."""
        self.store.close()

    # The records of the memory.

    def emit(self, record: tuple[Any, ...]) -> None:
        """Note the contents that enter and leave the prefix tree."""
        kind, values = record[0], record[1:]
        if kind == "seal":
            block_id, parent, salt, tokens = values
            above, position = self.store.identity.root(salt), 0
            if parent is not None:
                node = self._nodes[parent]
                above, position = node.key, node.position + len(node.token_ids)
            self._nodes[block_id] = Node(child(above, tokens), above, position, tokens)
            self._blocks[block_id] = (block_id,)
        elif kind == "evict":
            del self._nodes[values[0]]
            self._blocks.pop(values[0], None)
            self._entries.pop(values[0], None)
        elif kind == "seal_window":
            self._entries[values[0]] = values[1]
        elif kind == "evict_window":
            self._entries.pop(values[0], None)
        elif kind == "save":
            self._snapshots[values[0]] = values[1]
        elif kind == "forget":
            self._snapshots.pop(values[0], None)

    # Writing.

    def after_step(self, stats: StepStats) -> None:
        """Give the new contents of the prefix tree to the store.

        They wait while another process writes, because this process may be the next to write.
        """
        num_tokens = stats.num_prefill_tokens + stats.num_decode_tokens
        if stats.num_prefill_tokens >= self._manager.block_size:
            self._race.computed(num_tokens, stats.run_seconds)
        if self.store.is_writing:
            most = MAX_CONTENTS + num_tokens // self._manager.block_size
            self._write(self._blocks, most)
            self._write(self._entries, most, WINDOW)
            self._write_states()

    def _write(self, waiting: dict[int, tuple[int, ...]], most: int, part: str = BLOCK) -> None:
        contents = {key: waiting.pop(key) for key in [*islice(waiting, most)]}
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
        self.store.write(Block(name, part, *node[1:], data))

    # Reading.

    def before_step(self) -> None:
        """Read the blocks of the sequences that may be admitted next."""
        if self._manager.prefix is not self._tree:  # the memory has started again
            self._tree = self._manager.prefix
            for notes in (self._nodes, self._blocks, self._entries, self._snapshots):
                notes.clear()
        self._slow.clear()
        for seq in self._candidates.take():
            if seq.host is None:
                seq.host = self._read(seq)

    def is_slow(self, seq: Seq) -> bool:
        """Return whether the path of a sequence was not read now, because computing is faster."""
        return seq.seq_id in self._slow

    def _read(self, seq: Seq) -> HostTable | None:
        """Read the path of a sequence to the host, if that is faster than computing it."""
        size, salt, limit = self._manager.block_size, seq.request.cache_salt, len(seq.token_ids) - 1
        num_cached = len(self._manager.prefix.match(seq.token_ids, limit, salt))
        keys = self.store.find(seq.token_ids, salt, limit)
        self.num_queries += seq.num_tokens - num_cached * size
        while True:
            count = next((n for n in range(len(keys), 0, -1) if self._is_whole(keys[:n])), 0)
            if count <= num_cached:
                return None
            names = [*keys[:count], *self._beside(keys[:count])]
            num_saved = (count - num_cached) * size
            if self._race.is_lost(sum(map(self.store.size_of, names)), num_saved):
                self._slow.add(seq.seq_id)
                self.num_slow += 1
                return None
            start = self.clock()
            contents = [self.store.read(name) for name in names]
            data = [content for content in contents if content is not None]
            self._race.read(sum(map(len, data)), self.clock() - start)
            if len(data) == len(names):
                break
            keys = keys[: next(i for i, content in enumerate(contents) if content is None)]
        host = self._received(seq, count, data)
        if host is not None:
            self.num_hits += num_saved
            seq.request.metrics.num_disk_tokens = num_saved
        return host

    # Numbers.

    def counters(self) -> dict[str, int]:
        """The numbers for ``/metrics``. The names are names of vLLM where vLLM has them."""
        stats = self.store.stats
        return {
            "vllm:external_prefix_cache_queries": self.num_queries,
            "vllm:external_prefix_cache_hits": self.num_hits,
            "mie:disk_blocks_read": stats.num_read,
            "mie:disk_blocks_written": stats.num_written,
            "mie:disk_blocks_damaged": stats.num_damaged,
            "mie:disk_blocks_dropped": stats.num_dropped,
        }

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
