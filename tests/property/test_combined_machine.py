"""Check windows and states in one manager, with the model of every block and of every slot."""

from rare import check_machine
from test_memory_machine import MAX_TABLES, seen
from test_stateful_machine import StatefulMemory

from mie.memory.layers.states import States
from mie.memory.layers.window import Window
from mie.memory.layers.windows import Windows
from mie.memory.manager import KVCacheManager


class CombinedMemory(StatefulMemory):
    """The model has recurrent layers, and groups of layers that have a window."""

    def new_manager(self, num_blocks, block_size, **options):
        self.window = Window(
            size=1 + num_blocks % 6,
            num_groups=1 + num_blocks // 6 % 3,
            block_size=block_size,
            max_chunk=2 + num_blocks // 2 % 4,
        )
        self.groups = range(self.window.num_groups)
        self.part = States(MAX_TABLES + num_blocks % 5, num_host_states=MAX_TABLES)
        self.states, self.host_states = [None] * self.part.num_states, [None] * MAX_TABLES
        self.slots = [None] * MAX_TABLES
        parts = [Windows(self.window), self.part]
        if num_blocks % 2:
            parts.reverse()
        return KVCacheManager(2 * num_blocks, block_size, parts, **options)


COMMON = (
    *("grows refused", "opens refused", "forks", "forks copied", "swaps out", "swaps in"),
    *("hits of snapshots", "snapshots", "swaps in after a prefix hit", "broken off", "resets"),
    *("passes", "hits beyond a window", "evicted entries"),
)


def test_combined_machine():
    """Run 2,000 operations, and 75 times as many in `make test-all`."""
    check_machine(CombinedMemory, seen, dict.fromkeys(COMMON, 1))
