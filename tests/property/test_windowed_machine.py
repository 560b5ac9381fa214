"""Check `Windows` with the machine of the memory, whose model has blocks of each group."""

import pytest
from rare import check_machine
from test_memory_machine import Memory, seen

from mie.memory.layers.window import Window
from mie.memory.layers.windows import Windows
from mie.memory.manager import KVCacheManager


class WindowedMemory(Memory):
    def new_manager(self, num_blocks, block_size, **options):
        self.window = Window(
            size=1 + num_blocks % 6,
            num_groups=1 + num_blocks // 6 % 3,
            block_size=block_size,
            max_chunk=2 + num_blocks // 2 % 4,
        )
        self.groups = range(self.window.num_groups)
        return KVCacheManager(2 * num_blocks, block_size, [Windows(self.window)], **options)


COMMON = (
    *("grows refused", "opens refused", "full hits", "forks", "forks copied", "swaps out"),
    *("swaps in", "swaps in after a prefix hit", "host pool full", "broken off", "resets"),
    *("passes", "hits beyond a window", "hits cut", "evicted entries"),
)


def test_windowed_machine():
    """Run 2,000 operations, and 75 times as many in `make test-all`."""
    check_machine(WindowedMemory, seen, dict.fromkeys(COMMON, 2))


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_a_window_counts_entries_and_capacity(size, block_size):
    for num_groups, max_chunk in [(1, 2), (2, 3), (3, 5)]:
        window = Window(
            size=size, num_groups=num_groups, block_size=block_size, max_chunk=max_chunk
        )
        for start in range(40):
            for end in range(start + 1, start + max_chunk + 1):
                first = max(0, start - size + 1) // block_size
                assert window.reach(start) == first
                num_live = -(-end // block_size) - first
                assert num_live <= window.longest
                assert num_live <= window.num_decoding or end > start + 2
        for num_blocks in range(60):
            most = window.capacity(num_blocks)
            assert window.blocks_needed(most) <= num_blocks < window.blocks_needed(most + 1)
