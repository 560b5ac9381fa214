"""A state machine over KVCacheManager with a model of what every block contains.

The model writes like a runner would: a token is the whole sequence up to it, so a block that is
stale, shared wrongly or not copied shows at once.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from mie.memory.manager import KVCacheManager

NUM_BLOCKS, BLOCK_SIZE = 6, 2


class Sequence:
    """Tokens, how many of them are stored, and the table that says where."""

    def __init__(self, token_ids, table):
        self.token_ids, self.table = list(token_ids), table


class Memory(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.manager = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=True)
        self.open = []
        self.content = {}  # slot -> the tokens up to and including the one stored there

    # Few different tokens, so that prefixes meet; two tenants.
    @rule(
        target=sequences,
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from([None, "tenant"]),
        use_cache=st.booleans(),
    )
    def open_table(self, token_ids, salt, use_cache):
        table = self.manager.open_table(token_ids, salt=salt, use_cache=use_cache)
        assert table.num_tokens == table.num_cached < len(token_ids)
        assert use_cache or table.num_cached == 0
        sequence = Sequence(token_ids, table)
        sequence.salt = salt
        self.open.append(sequence)
        self.check_stored(sequence)
        return sequence

    @rule(sequence=sequences, count=st.integers(1, 5))
    def compute(self, sequence, count):
        """Grow, copy, write, commit: or nothing at all, if there is no room."""
        table, start = sequence.table, sequence.table.num_tokens
        stop = min(start + count, len(sequence.token_ids))
        before = (list(table.block_ids), self.manager.num_available)
        copies = self.manager.grow(table, stop)
        if copies is None:
            assert (list(table.block_ids), self.manager.num_available) == before
            return
        for src, dst in copies:
            for offset in range(BLOCK_SIZE):
                self.content[dst * BLOCK_SIZE + offset] = self.content.get(
                    src * BLOCK_SIZE + offset
                )
        for position in range(start, stop):
            slot = self.slot(table, position)
            block_id = table.block_ids[position // BLOCK_SIZE]
            holders = sum(block_id in other.table.block_ids for other in self.open)
            assert holders == 1, "written while shared"
            self.content[slot] = (sequence.salt, *sequence.token_ids[: position + 1])
        self.manager.commit(table, sequence.token_ids, stop)
        self.check_stored(sequence)

    @rule(sequence=sequences, token_id=st.integers(0, 1))
    def append(self, sequence, token_id):
        sequence.token_ids.append(token_id)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        twin = Sequence(sequence.token_ids, self.manager.fork(sequence.table))
        twin.salt = sequence.salt
        self.open.append(twin)
        return twin

    @rule(sequence=consumes(sequences))
    def close(self, sequence):
        self.manager.close_table(sequence.table)
        self.open.remove(sequence)

    @rule(target=sequences, sequence=consumes(sequences))
    def preempt_and_resume(self, sequence):
        self.close(sequence)
        return multiple(self.open_table(sequence.token_ids, sequence.salt, True))

    def slot(self, table, position):
        return table.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def check_stored(self, sequence):
        for position in range(sequence.table.num_tokens):
            expected = (sequence.salt, *sequence.token_ids[: position + 1])
            assert self.content[self.slot(sequence.table, position)] == expected

    @invariant()
    def nothing_is_lost(self):
        for sequence in self.open:
            self.check_stored(sequence)
        self.manager.check_invariants(sequence.table for sequence in self.open)
        used = {block_id for sequence in self.open for block_id in sequence.table.block_ids}
        assert self.manager.num_used == len(used)

    def teardown(self):
        for sequence in self.open:
            self.manager.close_table(sequence.table)
        assert self.manager.num_used == 0


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=200, stateful_step_count=50)
