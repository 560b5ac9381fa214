"""Check KVCacheManager with a state machine and a model of the contents of every block.

The model writes as a runner would, and a slot holds the salt and all tokens up to its own. So a
block that is stale, wrongly shared or not copied is noticed at once. A newly allocated block holds
nothing. Within a step the operations come in the scheduler's order: running sequences leave or grow
first, and then others are opened.
"""

from collections import Counter
from itertools import count, takewhile

from audit import check_memory
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rare import check_machine

from mie.engine.watch.snapshot import memory_snapshot
from mie.memory.layers.windows import Windows
from mie.memory.manager import KVCacheManager

MAX_TABLES = 6
seen: Counter[str] = Counter()

numbers = st.integers(0, 11)
# A single rule chooses the operation, because hypothesis leaves rules out at random, and these
# operations reach little without each other.
OPERATIONS = st.sampled_from(
    [
        *["add"] * 3,
        *["open_table"] * 5,
        *["plan_work"] * 6,
        *["end_step"] * 6,
        *["close"] * 2,
        *["swap_out"] * 2,
        "fork",
        "break_off",
        "drop_host",
        "reset",
    ]
)

BETWEEN_STEPS = {"fork", "drop_host", "reset"}
BEFORE_OPENING = {"plan_work", "swap_out", "close"}


class Sequence:
    """A sequence's tokens, and where they are stored: in a table, on the host, or nowhere."""

    def __init__(self, number, token_ids, salt, use_cache):
        self.number, self.token_ids = number, token_ids
        self.salt, self.use_cache = salt, use_cache
        self.table = self.host = None
        self.lends = False  # Whether its tokens can be copied already.

    def history(self, position, group=None):
        """Return what the layers with a window of a group, or the others, keep at a position."""
        history = (self.salt, *self.token_ids[: position + 1])
        return history if group is None else (group, *history)


def num_common(a, b):
    """Return the length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class Memory(RuleBasedStateMachine):
    window = None  # of a model that has layers with one, in groups
    groups = range(0)

    @initialize(
        num_slots=st.integers(8, 72),
        block_size=st.integers(1, 4),
        num_host_blocks=st.integers(0, 8),
        caching=st.sampled_from([True, True, True, False]),
        partial=st.sampled_from([True, True, False]),
        budget=st.sampled_from([None, None, 0, 1, 3]),
    )
    def begin(self, num_slots, block_size, num_host_blocks, caching, partial, budget):
        self.records = []
        num_blocks = num_slots // block_size
        self.manager = self.new_manager(
            num_blocks,
            block_size,
            enable_prefix_caching=caching,
            partial_block_sharing=partial,
            max_cached_blocks=budget if caching else None,
            num_host_blocks=num_host_blocks,
            emit=self.records.append,
        )
        self.size, self.shares_partial = block_size, caching and partial and not self.window
        self.device = [[None] * block_size for _ in range(self.manager.num_blocks)]
        self.host = [[None] * block_size for _ in range(num_host_blocks)]
        # The tables as a runner knows them, and those of layers with a window.
        self.rows = [[-1] * 99 for _ in range(MAX_TABLES)]
        self.windows = [[None] * 99 for _ in range(MAX_TABLES)]
        self.numbers = count()
        self.running, self.waiting = [], []
        self.notes = {}  # of each sequence
        self.begin_step()

    def new_manager(self, *args, **options):
        return KVCacheManager(*args, **options)

    def limited(self, table, end):
        """Return how far a chunk that should end at ``end`` may go."""
        return table.num_tokens + self.manager.chunk_limit(table, end - table.num_tokens)

    def entries_of(self, table):
        return self.manager.part(Windows).tables[table]

    def begin_step(self):
        self.work = {}  # sequence -> where its tokens of this step end
        self.is_opening = False  # While pins may exist, no sequence may leave.
        self.exported = []
        self.may_swap_in = True
        self.fresh = set()  # Blocks allocated in this step.
        self.lent = set()  # blocks of which a part is copied in this step

    @property
    def is_in_step(self):
        return bool(self.work or self.is_opening or self.exported)

    @rule(operation=OPERATIONS, pick=numbers, number=numbers)
    def do(self, operation, pick, number):
        """Run the operation, after its preconditions."""
        seen["operations"] += 1
        if operation in BETWEEN_STEPS and self.is_in_step:
            self.end_step(pick, number)
        if operation in BEFORE_OPENING and self.is_opening:
            self.end_step(pick, number)
        if operation in {"fork", *BEFORE_OPENING} and not self.running:
            operation = "open_table"
        if operation == "open_table" and not self.waiting:
            self.add(pick, number)
        getattr(self, operation)(pick, number)

    # Adding and closing sequences.

    def add(self, length, odd):
        """Add a sequence. Many tokens are equal or another sequence's, so that prefixes match.

        There are two tenants.
        """
        if len(self.waiting) < MAX_TABLES:
            number = next(self.numbers)
            token_ids = [int(i == odd) for i in range(length + 1)]
            if odd % 2 and self.running:
                other = self.running[length % len(self.running)]
                token_ids = [*other.token_ids[:12], 1 - odd % 3]
            salt = "tenant" if number % 4 == 3 else None
            self.waiting.append(Sequence(number, token_ids, salt, number % 5 != 4))

    def close(self, pick, number):
        """End the sequence, or preempt it to be recomputed."""
        seq = self.pick_idle(pick)
        if seq is not None:
            self.leave(seq)
            if number % 2 and len(self.waiting) < MAX_TABLES:
                self.waiting.append(seq)

    def drop_host(self, pick, _):
        swapped = [seq for seq in self.waiting if seq.host]
        if swapped:
            self.drop(swapped[pick % len(swapped)])
            seen["host tables dropped"] += 1

    def reset(self, *_):
        before = memory_snapshot(self.manager)
        if self.manager.reset_prefix_cache():
            assert not self.running
            assert self.manager.num_cached == 0
            seen["resets"] += 1
        else:
            assert self.running
            assert memory_snapshot(self.manager) == before

    # Running sequences, first within a step.

    def plan_work(self, pick, number):
        """Grow a table for the sequence's next tokens: all that are wanted, or none."""
        seq = self.pick_idle(pick)
        if seq is None:
            return
        table = seq.table
        end = min(table.num_tokens + 1 + number // 2, len(seq.token_ids))
        end = self.limited(table, end)
        if number % 2 or end > table.num_writable:
            before = self.everything()
            was_shared = end > table.num_tokens and self.num_holders(seq, table.num_tokens) > 1
            if not self.manager.grow(table, end):
                assert self.everything() == before
                missing = self.manager.blocks_for(end) - len(table.block_ids)
                if self.window:
                    num_entries = self.window.num_entries(table.num_tokens, end)
                    num_reserved = self.manager.part(Windows).tables[table].num_reserved
                    missing += max(0, num_entries - num_reserved) * len(self.groups)
                assert missing + was_shared > self.manager.num_available, (
                    "refused despite free blocks"
                )
                seen["grows refused"] += 1
                return
            self.take_notes()
            if was_shared:
                seq.lends = False
                seen["forks copied"] += 1
        self.work[seq] = end

    def swap_out(self, pick, _):
        seq = self.pick_idle(pick)
        if seq is None:
            return
        before = self.everything()
        seq.host = self.manager.swap_out(seq.table)
        if seq.host is None:
            assert self.everything() == before
            num_taken = sum(len(s.host.block_ids) for s in self.waiting if s.host)
            needed = self.manager.blocks_for(seq.table.num_tokens)
            if self.window:
                needed += (needed - self.window.reach(seq.table.num_tokens)) * len(self.groups)
            assert needed + num_taken > len(self.host), "refused despite free blocks"
            seen["host pool full"] += 1
            return
        assert seq.host.num_tokens == seq.table.num_tokens
        self.exported.append(seq)
        self.leave(seq)
        self.waiting.append(seq)
        seen["swaps out"] += 1

    # New sequences, after the running ones.

    def open_table(self, pick, number):
        if not self.waiting or len(self.running) == MAX_TABLES:
            return
        manager, seq = self.manager, self.waiting[pick % len(self.waiting)]
        if seq.host and not self.may_swap_in:
            return
        num_spare = max(0, number - 9)
        before = self.everything()
        host_ids = seq.host and seq.host.block_ids
        room = manager.find_allocation(
            seq.token_ids,
            salt=seq.salt,
            use_cache=seq.use_cache,
            host=seq.host,
            num_reserved=num_spare,
        )
        assert self.everything() == before, "looking changes nothing"
        if room is None:
            needed = manager.blocks_needed(len(seq.token_ids))
            assert needed + num_spare > manager.num_available, "refused despite free blocks"
            seen["opens refused"] += 1
            return
        self.check_match(seq, room, num_spare)
        row = min({*range(MAX_TABLES)} - {other.table.row for other in self.running})
        notes = self.notes.setdefault(seq.number, {})
        seq.table = table = manager.open_table(room, (seq.number, 0), row, notes)
        assert manager.num_available >= num_spare
        assert len(table.block_ids) == manager.blocks_for(len(seq.token_ids))
        assert table.num_tokens == room.num_computed < len(seq.token_ids)
        if host_ids:
            seen["swaps in"] += 1
            seen["swaps in after a prefix hit"] += bool(room.path)
        elif room.path:
            seen["full hits"] += 1
            if self.window:
                seen["hits beyond a window"] += self.entries_of(table).num_passed > 0
        if room.partial:
            self.lent.add(room.partial.block_id)
            seen["partial hits, cached" if room.partial.node else "partial hits, running"] += 1
        self.take_notes()
        seq.host, seq.lends = None, False
        self.waiting.remove(seq)
        self.running.append(seq)
        num_missing = len(seq.token_ids) - room.num_computed
        self.work[seq] = self.limited(table, room.num_computed + 1 + number % num_missing)
        self.is_opening = True

    # The end of a step.

    def end_step(self, samples, number):
        """Make the moves and write the tokens. A sequence that has caught up gets another token."""
        moves = self.manager.take_moves()
        self.make(moves)
        self.check_contents()
        for seq, end in self.work.items():
            self.write(seq, end)
        self.manager.end_step()
        # As in the scheduler, a sequence's first step since it was opened is no decode.
        decodes = [
            seq
            for seq, end in self.work.items()
            if seq.lends and end == seq.table.num_tokens + 1 and number % 3
        ]
        self.manager.advance([seq.table for seq in decodes])
        for seq, end in self.work.items():
            if seq not in decodes:
                self.manager.commit(seq.table, end)
            seq.lends = True
            if end == len(seq.token_ids):
                seq.token_ids.append(samples >> seq.table.row & 1)
        self.begin_step()
        self.take_notes()  # of blocks for the next chunk
        self.check_contents()

    def break_off(self, num_written, number):
        """Abandon a step in the middle: every sequence waits again, with nothing stored."""
        if not self.is_in_step:
            return
        if number % 2:
            self.make(self.manager.take_moves())
            for seq, end in list(self.work.items())[:num_written]:
                self.write(seq, end)
        self.manager.end_step(has_moved=False)
        for seq in self.exported:
            if seq.host is not None:
                self.drop(seq)
        for seq in self.running[::-1]:
            self.leave(seq)
            if len(self.waiting) < MAX_TABLES:
                self.waiting.append(seq)
        self.begin_step()
        seen["broken off"] += 1

    def fork(self, pick, number):
        complete = [
            seq
            for seq in self.running
            if len(seq.table.block_ids) == self.manager.blocks_for(seq.table.num_tokens)
        ]
        split = [seq for seq in complete if seq.table.num_tokens % self.size]
        complete = split or complete
        for _ in range(1 + number % 2 if complete else 0):
            if len(self.running) == MAX_TABLES:
                return
            if self.window and self.manager.num_available < self.manager.blocks_per_fork:
                return  # as in the scheduler
            seq = complete[pick % len(complete)]
            twin = Sequence(next(self.numbers), list(seq.token_ids), seq.salt, seq.use_cache)
            row = min({*range(MAX_TABLES)} - {other.table.row for other in self.running})
            twin.table = self.manager.fork(seq.table, (twin.number, 0), row, twin.token_ids)
            twin.lends = seq.lends
            self.notes[twin.number] = self.notes[seq.number]
            self.running.append(twin)
            seen["forks"] += 1

    # Parts of the above.

    def pick_idle(self, pick):
        """Return a running sequence that has no work in this step, or None if all have."""
        idle = [seq for seq in self.running if seq not in self.work]
        return idle[pick % len(idle)] if idle else None

    def num_holders(self, seq, position):
        """Return how many tables hold the block of this position."""
        index = position // self.size
        if index == len(seq.table.block_ids):
            return 0
        block_id = seq.table.block_ids[index]
        return sum(block_id in other.table.block_ids for other in self.running)

    def blocks_of(self, seq, position):
        """Yield the group of layers and the block of each place where the position is kept."""
        yield None, seq.table.block_ids[position // self.size]
        if self.window and position > seq.table.num_tokens - self.window.size:
            own = self.entries_of(seq.table)
            entry = own.entries[position // self.size - own.num_passed]
            yield from zip(self.groups, entry, strict=True)

    def leave(self, seq):
        # Imports come before exports and copies, so they must not take a block that these read. The
        # scheduler admits no sequence in a step that preempted.
        self.may_swap_in = not self.is_in_step
        self.manager.close_table(seq.table)
        seq.table = None
        self.running.remove(seq)

    def drop(self, seq):
        self.manager.host.drop(seq.host)
        seq.host = None

    def everything(self):
        """Return everything that can be observed."""
        manager = self.manager
        return (
            memory_snapshot(manager),
            (manager.num_available, manager.num_cached, manager.num_saved),
            manager.num_slots_empty,
            {name: value for name, value in vars(manager.stats).items() if name != "_window"},
            [(s.table.held_ids, s.table.num_writable, s.lends) for s in self.running],
            len(self.records),
        )

    def take_notes(self):
        """Record which blocks were allocated since the last call."""
        for kind, *fields in self.records:
            if kind in ("alloc", "alloc_window"):
                self.fresh.update(fields[2])
            seen["passes"] += kind == "pass"
            seen["evicted entries"] += kind == "evict_window"
        self.records.clear()

    def check_match(self, seq, room, num_spare):
        """Assert that the room shares the blocks that an exhaustive search finds."""
        if not seq.use_cache:
            assert room.num_computed == (seq.host.num_tokens if seq.host else 0)
            return
        tokens, limit, size = tuple(seq.token_ids), len(seq.token_ids) - 1, self.size
        paths = self.cached_paths(seq.salt)
        num_full = 0
        while num_full + size <= limit and tokens[: num_full + size] in paths:
            num_full += size
        while self.window and not all(
            paths[tokens[: (index + 1) * size]]
            for index in range(self.window.reach(num_full), num_full // size)
        ):
            num_full -= size
            seen["hits cut"] += 1
        assert len(room.path) * size == num_full
        if seq.host:
            assert room.num_computed == max(num_full, seq.host.num_tokens)
            return
        least = most = num_full
        if self.shares_partial:
            known = [num_common(path, tokens) for path in paths]
            known += [self.num_stored_alike(s, seq) for s in self.running if s.lends]
            least = max([num_full, *(min(num, limit, num_full + size) for num in known)])
            known += [self.num_stored_alike(s, seq) for s in self.running if s not in self.work]
            most = max([num_full, *(min(num, limit, num_full + size) for num in known)])
        num_new = self.manager.blocks_for(len(tokens)) - num_full // size
        is_tight = num_new >= self.manager.num_available - num_spare - sum(
            node in self.manager.prefix.unheld for node in room.path
        )
        assert room.num_computed <= most
        assert room.num_computed >= least or (is_tight and room.num_computed == num_full)

    def num_stored_alike(self, lender, seq):
        if lender.salt != seq.salt:
            return 0
        return num_common(lender.token_ids[: lender.table.num_tokens], seq.token_ids)

    def cached_paths(self, salt):
        """Return the token sequences that the paths of the tree spell, and their entries."""
        tree = memory_snapshot(self.manager)["tree"]

        def spelled(block_id):
            if block_id is None:
                return ()
            return (*spelled(tree[block_id]["parent"]), *tree[block_id]["tokens"])

        return {
            spelled(block_id): node.get("entry")
            for block_id, node in tree.items()
            if node["salt"] == salt
        }

    def make(self, moves):
        """Update the tables and move the blocks, as a runner does."""
        assert not self.lent & self.fresh, "a source was taken before it was copied"
        for row, index, block_ids in moves.updates:
            self.rows[row][index : index + len(block_ids)] = block_ids
        for seq in self.running:
            known = self.rows[seq.table.row][: len(seq.table.block_ids)]
            assert known == seq.table.block_ids, "the runner was not told"
        for row, index, entry in moves.parts["windows"].updates if self.window else ():
            self.windows[row][index] = entry
        for seq in self.running if self.window else ():
            own = self.entries_of(seq.table)
            known = self.windows[seq.table.row][own.num_passed :][: len(own.entries)]
            assert known == own.entries, "the runner was not told of an entry"
        for host_id, block_id in moves.imports:
            self.device[block_id], self.host[host_id] = self.host[host_id], [None] * self.size
        for block_id, host_id in moves.exports:
            self.host[host_id] = list(self.device[block_id])
        sources = [list(self.device[source]) for source, _ in moves.copies]
        for block_id in self.fresh - {target for _, target in moves.imports}:
            self.device[block_id] = [None] * self.size
        for (_, target), content in zip(moves.copies, sources, strict=True):
            self.device[target] = content

    def write(self, seq, end):
        table = seq.table
        for position in range(table.num_tokens, end):
            for group, block_id in self.blocks_of(seq, position):
                holders = sum(block_id in other.table.held_ids for other in self.running)
                assert holders == 1, "written while shared"
                self.device[block_id][position % self.size] = seq.history(position, group)

    def check_contents(self):
        for seq in self.running:
            for position in range(seq.table.num_tokens):
                for group, block_id in self.blocks_of(seq, position):
                    found = self.device[block_id][position % self.size]
                    assert found == seq.history(position, group)
        for seq in self.waiting if not self.is_in_step else ():
            self.check_host(seq)

    def check_host(self, seq):
        if not seq.host:
            return
        num_tokens, size = seq.host.num_tokens, self.size
        num_full = self.manager.blocks_for(num_tokens)
        full, others = seq.host.block_ids[:num_full], seq.host.block_ids[num_full:]
        first = self.window.reach(num_tokens) if self.window else 0
        places = [(None, full[i // size], i) for i in range(num_tokens)]
        for i in range(max(0, num_tokens - self.window.size + 1) if self.window else 0, num_tokens):
            at = (i // size - first) * len(self.groups)
            places += [(group, others[at + group], i) for group in self.groups]
        for group, host_id, i in places:
            assert self.host[host_id][i % size] == seq.history(i, group)

    @invariant()
    def nothing_is_lost(self):
        if self.is_opening:
            return
        tables = [seq.table for seq in self.running]
        check_memory(self.manager, tables, [seq.host for seq in self.waiting if seq.host])
        used = {block_id for table in tables for block_id in table.held_ids}
        assert self.manager.num_used == len(used)

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        self.manager.end_step()
        for seq in self.running[:]:
            self.leave(seq)
        for seq in self.waiting:
            if seq.host:
                self.drop(seq)
        check_memory(self.manager, [])
        assert self.manager.num_used == 0
        assert self.manager.reset_prefix_cache()
        assert self.manager.num_available == self.manager.num_blocks


COMMON = (
    *("grows refused", "opens refused", "full hits", "partial hits, cached"),
    *("partial hits, running", "forks", "forks copied", "swaps out", "swaps in"),
    *("swaps in after a prefix hit", "host pool full", "host tables dropped"),
    *("broken off", "resets"),
)


def test_memory_machine():
    """Run 3,000 operations, and 50 times as many in `make test-all`."""
    # The operations would prove little if these cases were rare.
    check_machine(Memory, seen, {"operations": 3000, **dict.fromkeys(COMMON, 2)}, 60)
