"""Check `States` with the machine of the memory, and a model of the contents of every slot.

A slot holds the salt and all tokens that its state has seen. So a state that is stale, shared or of
another position is noticed at once.
"""

from rare import check_machine
from test_memory_machine import MAX_TABLES, Memory, seen

from mie.memory.layers.states import States
from mie.memory.manager import KVCacheManager


class StatefulMemory(Memory):
    def new_manager(self, num_blocks, block_size, **options):
        num_states = MAX_TABLES + num_blocks % 5
        self.states, self.host_states = [None] * num_states, [None] * MAX_TABLES
        self.slots = [None] * MAX_TABLES  # of the rows, as a runner knows them
        self.part = States(num_states, num_host_states=MAX_TABLES)
        return KVCacheManager(num_blocks, block_size, [self.part], **options)

    def check_match(self, seq, room, num_spare):
        """Assert that the table begins at the deepest snapshot, or with the state on the host."""
        tokens, most = tuple(seq.token_ids), seq.host.num_tokens if seq.host else 0
        if seq.use_cache:
            for salt, *path in map(self.history_of, self.part.snapshots):
                is_prefix = salt == seq.salt and tokens[: len(path)] == tuple(path)
                if is_prefix and len(path) < len(tokens) and self.is_in_windows(path, salt):
                    most = max(most, len(path))
        assert room.num_computed == most
        assert room.partial is None
        seen["hits of snapshots"] += bool(room.path) and not seq.host

    def is_in_windows(self, path, salt):
        """Whether the cache has the entries within reach after a path, if the model has windows."""
        paths = self.cached_paths(salt) if self.window else {}
        first = self.window.reach(len(path)) if self.window else len(path)
        ends = range((first + 1) * self.size, len(path) + 1, self.size)
        return all(paths[tuple(path[:end])] for end in ends)

    def history_of(self, node):
        """Return the salt and all tokens on the path to a node."""
        if node.parent is None:
            return (node.salt,)
        return (*self.history_of(node.parent), *node.tokens)

    def make(self, moves):
        super().make(moves)
        moves = moves.parts["states"]
        for row, _, slots in moves.updates:
            self.slots[row] = slots[0]
        for slot, host_slot in moves.exports:
            self.host_states[host_slot] = self.states[slot]
        found = [self.states[source] for source, _ in moves.copies]
        for (_, target), state in zip(moves.copies, found, strict=True):
            self.states[target] = state
        for host_slot, slot in moves.imports:
            self.states[slot] = self.host_states[host_slot]

    def write(self, seq, end):
        super().write(seq, end)
        slots = [self.slots[other.table.row] for other in self.running]
        assert len(set(slots)) == len(slots), "two rows have one slot"
        self.states[self.slots[seq.table.row]] = seq.history(end - 1)

    def check_contents(self):
        super().check_contents()
        part = self.part
        for seq in self.running:
            slot, num_tokens = part.states[seq.table].slot, seq.table.num_tokens
            if num_tokens:
                assert self.states[part.content(slot)] == seq.history(num_tokens - 1)
        for node, snapshot in part.snapshots.items():
            assert self.states[part.content(snapshot.slot)] == self.history_of(node)
            seen["snapshots"] += 1


COMMON = (
    *("hits of snapshots", "snapshots", "forks", "forks copied", "swaps out", "swaps in"),
    *("swaps in after a prefix hit", "broken off", "resets"),
)


def test_stateful_machine():
    """Run 2,000 operations, and 75 times as many in `make test-all`."""
    check_machine(StatefulMemory, seen, dict.fromkeys(COMMON, 1))
