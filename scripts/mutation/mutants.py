"""List the mutants of `mutate.py`: one wrong line each, and what it would break."""

from __future__ import annotations

from mutation.jit_mutants import JIT_MUTANTS
from mutation.mutant import Mutant

POOL = "mie/memory/pool.py"
PREFIX = "mie/memory/prefix.py"
MANAGER = "mie/memory/manager.py"
POLICY = "mie/sched/policy.py"
QUEUES = "mie/sched/queues.py"
FAIR = "mie/sched/fair.py"
BUDGET = "mie/sched/budget.py"
PLACES = "mie/sched/places.py"
ADMISSION = "mie/sched/admission.py"
SCHEDULER = "mie/sched/scheduler.py"
SEQUENCE = "mie/sched/sequence.py"
SEATS = "mie/sched/seats.py"
AHEAD = "mie/sched/ahead.py"
OPENING = "mie/sched/opening.py"


# Reference counts.

COUNTS = (
    Mutant(
        "freed-with-a-holder-left",
        POOL,
        "            if refcounts[block_id] == 0:",
        "            if refcounts[block_id] <= 1:",
        "a block is given to a second sequence while the first still reads it",
    ),
    Mutant(
        "one-block-too-many",
        MANAGER,
        "        return ceil_div(num_tokens, self.block_size)",
        "        return num_tokens // self.block_size + 1",
        "a sequence that just fills its blocks reserves an empty one",
    ),
    Mutant(
        "cache-holds-without-counting",
        MANAGER,
        "                self._pool.incref(own)",
        "                pass",
        "a cached block is free when its table closes, and is overwritten under the tree",
    ),
    Mutant(
        "merge-leaks-own-block",
        MANAGER,
        "                self._release(table, own)",
        "                pass",
        "each merge of equal blocks loses a block for ever",
    ),
    Mutant(
        "merge-not-done",
        MANAGER,
        '                self._put("share", table, index, self._hold(child))',
        "                node = child\n                table.num_committed += 1\n"
        "                continue",
        "equal blocks are kept twice, and the tree thinks the table holds what it does not",
    ),
    Mutant(
        "fork-takes-no-reference",
        MANAGER,
        "        self._pool.incref(*table.block_ids)\n",
        "",
        "the first sibling to leave frees the blocks of the others",
    ),
    Mutant(
        "close-lets-go-of-held-nodes",
        MANAGER,
        "while node and node.block_id is not None and self._pool.refcount(node.block_id) == 1:",
        "while node and node.block_id is not None:",
        "blocks that another table still reads count as evictable",
    ),
    Mutant(
        "more-evicted-than-needed",
        MANAGER,
        "self._evict(count - self._pool.num_free)",
        "self._evict(min(count, self.num_cached))",
        "cached prefixes are thrown away while blocks are free",
    ),
)

# Forks, and copies before a write.

FORKS = (
    Mutant(
        "write-without-copy",
        MANAGER,
        "            and self._pool.refcount(table.block_ids[index]) > 1\n",
        "            and False\n",
        "a choice writes its token over its sibling's",
    ),
    Mutant(
        "last-holder-copies-too",
        MANAGER,
        "            and self._pool.refcount(table.block_ids[index]) > 1\n",
        "            and self._pool.refcount(table.block_ids[index]) > 0\n",
        "every step copies the block that it writes to",
    ),
    Mutant(
        "copy-keeps-its-source",
        MANAGER,
        "            self._release(table, shared)\n",
        "",
        "a forked block never comes home",
    ),
    Mutant(
        "copy-needs-no-room",
        MANAGER,
        "        if num_new + is_shared > self.num_available:",
        "        if num_new > self.num_available:",
        "a fork's copy takes a block that is not there",
    ),
    Mutant(
        "parent-goes-on-writing",
        MANAGER,
        "twin.num_tokens = twin.num_writable = table.num_writable = table.num_tokens",
        "twin.num_tokens = twin.num_writable = table.num_tokens",
        "the first choice writes into the block that its siblings still share",
    ),
    Mutant(
        "last-holder-stays-unwritable",
        MANAGER,
        "        table.num_writable = len(table.block_ids) * self.block_size\n        return True",
        "        return True",
        "the last holder of a forked block never grows again, and writes behind its table",
    ),
    Mutant(
        "runner-not-told-of-fork",
        MANAGER,
        "        self._moves.updates.append((row, 0, tuple(table.block_ids)))\n",
        "",
        "the runner reads another sequence's blocks in the fork's row",
    ),
    Mutant(
        "fork-publishes-again",
        MANAGER,
        "twin.num_committed, twin.has_run = table.num_committed, table.has_run",
        "twin.num_committed, twin.has_run = 0, table.has_run",
        "a fork's first block is published as the one that follows the prompt",
    ),
    Mutant(
        "fork-stands-at-the-root",
        MANAGER,
        "self._prefix.enter(twin, table.node)",
        "self._prefix.enter(twin, None)",
        "what a fork generates is found without its prompt",
    ),
    Mutant(
        "fork-never-lends",
        MANAGER,
        "twin.num_committed, twin.has_run = table.num_committed, table.has_run",
        "twin.num_committed = table.num_committed",
        "what a fork generated is not shared before its block is full",
    ),
)

# Prefix hits: whole blocks and parts.

HITS = (
    Mutant(
        "full-match-beyond-limit",
        PREFIX,
        "for start in range(0, limit - size + 1, size):",
        "for start in range(0, limit + 1, size):",
        "a prompt of whole blocks has no logits to sample from",
    ),
    Mutant(
        "partial-match-beyond-limit",
        PREFIX,
        "min(limit, start + self._block_size)",
        "min(limit + 1, start + self._block_size)",
        "a prompt inside a longer block has no logits to sample from",
    ),
    Mutant(
        "salt-ignored",
        MANAGER,
        "        limit = len(token_ids) - 1\n",
        "        limit, salt = len(token_ids) - 1, None\n",
        "a tenant can tell from the speed what another one asked",
    ),
    Mutant(
        "salt-ignored-inside-blocks",
        PREFIX,
        "node = path[-1] if path else self._roots.get(salt)",
        "node = path[-1] if path else self._roots.get(None)",
        "the same, for the first part of a block",
    ),
    Mutant(
        "salt-not-handed-on",
        OPENING,
        "            salt=seq.request.cache_salt,\n",
        "",
        "requests of all tenants share one cache",
    ),
    Mutant(
        "cache-used-when-forbidden",
        MANAGER,
        "        if use_cache and parent is None and self.shares_full:",
        "        if parent is None and self.shares_full:",
        "prompt log-probabilities of cached tokens are missing",
    ),
    Mutant(
        "unwritten-tokens-lend",
        PREFIX,
        "table.token_ids[start : min(table.num_tokens, start + len(wanted))]",
        "table.token_ids[start : start + len(wanted)]",
        "a copy is made before its source is written",
    ),
    Mutant(
        "planned-copy-lends",
        PREFIX,
        "if table.has_run and written and",
        "if written and",
        "a copy of a copy that was not made yet",
    ),
    Mutant(
        "copy-of-a-fork-lends",
        MANAGER,
        "            table.has_run = False\n",
        "",
        "the same, where the copy is a fork's",
    ),
    Mutant(
        "run-does-not-lend",
        MANAGER,
        "        table.has_run = True\n        self._publish(table)",
        "        self._publish(table)",
        "the begun block of a running sequence is never shared",
    ),
    Mutant(
        "lends-the-last-block",
        PREFIX,
        "                    index = table.num_committed\n",
        "                    index = -1\n",
        "a prompt of several blocks lends its last one for the first that is not full",
    ),
    Mutant(
        "left-neighbour-missed",
        PREFIX,
        "node.sorted_tokens[max(0, place - 1) : place + 1]",
        "node.sorted_tokens[place : place + 1]",
        "the block with the longest common prefix is not found if it sorts before",
    ),
    Mutant(
        "right-neighbour-missed",
        PREFIX,
        "node.sorted_tokens[max(0, place - 1) : place + 1]",
        "node.sorted_tokens[max(0, place - 1) : place]",
        "the block with the longest common prefix is not found if it sorts after",
    ),
    Mutant(
        "children-not-sorted",
        PREFIX,
        "        insort(parent.sorted_tokens, tokens)",
        "        parent.sorted_tokens.append(tokens)",
        "the best child is looked for in the wrong place",
    ),
    Mutant(
        "shared-blocks-published-again",
        MANAGER,
        "        table.num_committed = len(room.path)\n",
        "",
        "a shared first block is published as its own successor",
    ),
    Mutant(
        "decodes-not-published",
        MANAGER,
        "            if not table.num_tokens % size:",
        "            if False:",
        "a conversation's answers are computed again in its next turn",
    ),
    Mutant(
        "published-without-a-cache",
        MANAGER,
        "        if not self.shares_full:\n            return\n",
        "",
        "blocks stay allocated after their sequences although prefix caching is off",
    ),
    Mutant(
        "begun-block-published",
        MANAGER,
        "range(table.num_committed, table.num_tokens // size)",
        "range(table.num_committed, self.blocks_for(table.num_tokens))",
        "a block is shared while its owner still writes to it",
    ),
    Mutant(
        "next-block-under-the-old-node",
        MANAGER,
        "        if node is not table.node:\n            self._prefix.enter(table, node)",
        "        pass",
        "a block is found after the wrong prefix",
    ),
)

# Pins: the source of a copy stays until the copy is made.

PINS = (
    Mutant(
        "source-not-pinned",
        MANAGER,
        "            self._pin(room.partial)\n",
        "            pass\n",
        "the source of a copy is evicted, and overwritten in the step that copies it",
    ),
    Mutant(
        "pinned-too-late",
        MANAGER,
        "            self._pin(room.partial)\n"
        "        index = len(table.block_ids)\n"
        '        self._put("alloc", table, index, self._take_blocks(room.num_new, table))\n',
        "            pass\n"
        "        index = len(table.block_ids)\n"
        '        self._put("alloc", table, index, self._take_blocks(room.num_new, table))\n'
        "        if room.partial:\n"
        "            self._pin(room.partial)\n",
        "the blocks for the rest of a prompt push out the one whose beginning it copies",
    ),
    Mutant(
        "pin-not-released",
        MANAGER,
        "            self._pool.decref(block_id)\n            self._offer(node)",
        "            self._offer(node)",
        "every partial hit loses a block for ever",
    ),
    Mutant(
        "pin-takes-the-last-block",
        MANAGER,
        "if partial and partial.node in self._prefix.unheld and num_new == room:",
        "if False:",
        "a prompt that would fit without its partial hit finds no block",
    ),
    Mutant(
        "unpinned-node-stays-held",
        MANAGER,
        "            self._offer(node)\n        self._pinned.clear()",
        "        self._pinned.clear()",
        "a block that was copied from is never evicted again",
    ),
    Mutant(
        "unpinned-although-in-use",
        MANAGER,
        "            self._offer(node)\n        self._pinned.clear()",
        "            if node is not None:\n                self._prefix.unheld[node] = None\n"
        "        self._pinned.clear()",
        "a block that came into use while it was pinned counts as evictable",
    ),
)

# What stays in the cache, and what goes.

EVICTION = (
    Mutant(
        "most-recently-used-evicted",
        PREFIX,
        "        node, _ = self.unheld.popitem(last=False)",
        "        node = next(each for each in reversed(self.unheld) if not each.children)\n"
        "        del self.unheld[node]",
        "the system prompt that everybody uses is the first to go",
    ),
    Mutant(
        "held-node-evicted",
        MANAGER,
        "            del self._prefix.unheld[node]\n",
        "            pass\n",
        "a block is taken from a running sequence",
    ),
    Mutant(
        "parent-before-its-child",
        MANAGER,
        "            self._prefix.unheld[node] = None\n",
        "            self._prefix.unheld[node] = None\n"
        "            self._prefix.unheld.move_to_end(node, last=False)\n",
        "a block is evicted while cached blocks still continue it",
    ),
    Mutant(
        "parent-never-offered",
        MANAGER,
        "        while node and node.block_id is not None and self._pool",
        "        if node and node.block_id is not None and self._pool",
        "only the leaves of the tree can be evicted; the cache is full of roots",
    ),
    Mutant(
        "root-of-open-tables-dropped",
        PREFIX,
        "if node.block_id is None and not node.children and not node.tables:",
        "if node.block_id is None and not node.children:",
        "what a running sequence computes is published in a tree that nobody finds",
    ),
    Mutant(
        "root-of-cached-blocks-dropped",
        PREFIX,
        "if node.block_id is None and not node.children and not node.tables:",
        "if node.block_id is None and not node.tables:",
        "a cache is forgotten, and its blocks lost, when the last table closes",
    ),
    Mutant(
        "empty-root-stays",
        PREFIX,
        "        self._drop_empty_root(table.node)\n",
        "",
        "every tenant that ever came costs memory",
    ),
    Mutant(
        "budget-ignored-at-close",
        MANAGER,
        "        self._evict(self.num_cached - self._max_cached)\n        table.block_ids = []",
        "        table.block_ids = []",
        "the cache keeps more than max_cached_blocks",
    ),
    Mutant(
        "reset-while-in-use",
        MANAGER,
        "        if self._num_entries:\n            return False",
        "        if False:\n            return False",
        "reset_prefix_cache says that all is forgotten while a running sequence's blocks are not",
    ),
)

# Room: what an admission may take.

ROOM = (
    Mutant(
        "spare-blocks-ignored",
        MANAGER,
        "self.num_available - num_spare - len(self._prefix.unheld_end(path))",
        "self.num_available - len(self._prefix.unheld_end(path))",
        "an admission takes the blocks that running sequences need next, and is preempted for it",
    ),
    Mutant(
        "shared-path-counted-as-free",
        MANAGER,
        "self.num_available - num_spare - len(self._prefix.unheld_end(path))",
        "self.num_available - num_spare",
        "a prompt is admitted into the very blocks that it shares",
    ),
    Mutant(
        "watermark-ignored",
        SCHEDULER,
        "num_spare = self._num_spare + self._seats.num_promised if self.running else 0",
        "num_spare = self._seats.num_promised if self.running else 0",
        "the watermark setting does nothing",
    ),
    Mutant(
        "blocks-of-forks-given-away",
        SCHEDULER,
        "num_spare = self._num_spare + self._seats.num_promised if self.running else 0",
        "num_spare = self._num_spare if self.running else 0",
        "who is admitted next takes the blocks that were kept for a request's choices",
    ),
    Mutant(
        "forks-without-blocks",
        SCHEDULER,
        "return max(0, min(num_seats, num_blocks))",
        "return max(0, num_seats)",
        "the choices of a request preempt each other right after its prompt",
    ),
    Mutant(
        "forks-counted-once-too-often",
        SCHEDULER,
        "            self._seats.promised[seq.request.client] += len(choices) - 1\n",
        "            self._seats.promised[seq.request.client] += len(choices)\n",
        "a seat stays empty for a step beside those who wait for it",
    ),
    Mutant(
        "forks-reserved-after-the-fork",
        SCHEDULER,
        "        self._step += 1\n        self._seats.promised.clear()\n",
        "        self._step += 1\n",
        "with every forked request some more seats are never used again",
    ),
    Mutant(
        "forks-pass-the-watermark",
        SCHEDULER,
        "num_blocks = self.manager.num_available - self._num_spare - self._seats.num_promised",
        "num_blocks = self.manager.num_available - self._seats.num_promised",
        "choices take the blocks with which the running could go on",
    ),
    Mutant(
        "forks-of-one-step-share-a-block",
        SCHEDULER,
        "num_blocks = self.manager.num_available - self._num_spare - self._seats.num_promised",
        "num_blocks = self.manager.num_available - self._num_spare",
        "two requests that fork in one step preempt each other",
    ),
    Mutant(
        "alone-and-waiting",
        SCHEDULER,
        "num_spare = self._num_spare + self._seats.num_promised if self.running else 0",
        "num_spare = self._num_spare + self._seats.num_promised",
        "a request that needs nearly all blocks waits for ever in an idle engine",
    ),
    Mutant(
        "seats-of-forks-given-away",
        SEATS,
        "return len(self._free) - self.num_promised",
        "return len(self._free)",
        "more than max_num_seqs sequences run once a request forks",
    ),
    Mutant(
        "choices-overtake",
        POLICY,
        "return 0 if waiting and waiting[0].key < seq.key else seats.num_free",
        "return seats.num_free",
        "choices of a request pass one that is more urgent",
    ),
    Mutant(
        "choices-without-a-seat-forgotten",
        SCHEDULER,
        "                self._wait(sibling, first)\n                continue\n",
        "                continue\n",
        "a request with more choices than free seats never ends",
    ),
    Mutant(
        "ended-choice-forks",
        SCHEDULER,
        "live = [each.index for each in seq.request.sequences if each.finish_reason is None]",
        "live = [each.index for each in seq.request.sequences]",
        "a choice that was aborted before the fork gets tokens and a seat",
    ),
    Mutant(
        "no-heir",
        SCHEDULER,
        "        if heir is not None:\n            self._wait(heir, seq)\n",
        "",
        "a request whose first choice is aborted in its prompt never ends",
    ),
    Mutant(
        "choices-count-as-queries",
        OPENING,
        "if not any(each.was_admitted for each in seq.request.sequences):",
        "if True:",
        "choices that wait for a seat raise the hit rate with their own prompt",
    ),
    Mutant(
        "largest-prompt-refused",
        ADMISSION,
        "if manager.blocks_for(num_prompt) > manager.num_blocks:",
        "if manager.blocks_for(num_prompt) >= manager.num_blocks:",
        "a prompt that fits is refused",
    ),
)

# Budgets and order within a step.

STEPS = (
    Mutant(
        "decodes-not-in-the-budget",
        SCHEDULER,
        "                chunks.append(self._chunk(seq, count := min(count, most)))\n"
        "            budget.take(seq.request, count)\n",
        "                chunks.append(self._chunk(seq, count := min(count, most)))\n",
        "a step computes more than max_num_batched_tokens",
    ),
    Mutant(
        "decodes-beyond-the-budget",
        SCHEDULER,
        "            if not most:\n                continue\n",
        "",
        "more sequences decode than a step may compute tokens",
    ),
    Mutant(
        "running-prompts-not-in-the-budget",
        SCHEDULER,
        "                    budget.take(seq.request, count)\n                elif",
        "                elif",
        "each running prompt takes the whole budget",
    ),
    Mutant(
        "decodes-out-of-order",
        SCHEDULER,
        "        rows.sort()\n",
        "",
        "the rows of a plan do not ascend, as the runner is promised",
    ),
    Mutant(
        "chunk-limit-ignored",
        SCHEDULER,
        "return min(num_missing, budget, self._max_chunk)",
        "return min(num_missing, budget)",
        "max_prefill_chunk does nothing: a long prompt delays everybody",
    ),
    Mutant(
        "chunked-although-forbidden",
        SCHEDULER,
        "        if not self._config.enable_chunked_prefill:",
        "        if False:",
        "enable_chunked_prefill=False does nothing",
    ),
    Mutant(
        "opened-without-work",
        SCHEDULER,
        "            if not count and not is_static:\n                return",
        "            if False:\n                return",
        "a prompt that has to wait for its turn takes its blocks already, and is overtaken",
    ),
    Mutant(
        "running-prompt-overtaken",
        SCHEDULER,
        "                elif budget.parts is None:\n                    break\n",
        "",
        "without chunking a running prompt that is too long for what is left starves",
    ),
    Mutant(
        "static-admits-early",
        SCHEDULER,
        "            return not self.running",
        "            return True",
        "static batching is continuous batching, and the comparison of the two a lie",
    ),
    Mutant(
        "admits-after-preemption",
        SCHEDULER,
        "return len(self._preempted) == num_made_way or self._config.admit_after_preemption",
        "return True",
        "blocks that were taken from one sequence go to a newcomer",
    ),
    Mutant(
        "first-is-the-victim",
        SCHEDULER,
        "self.preempt(order.pop(), by=seq)",
        "self.preempt(order.pop(0), by=seq)",
        "the sequence that came first is thrown out for those behind it",
    ),
    Mutant(
        "forks-at-the-end-of-the-queue",
        SEATS,
        "        enqueue(self.running, seq)",
        "        self.running.append(seq)",
        "forks are preempted as if they had arrived last",
    ),
    Mutant(
        "priority-inverted",
        POLICY,
        "            return request.priority\n",
        "            return -request.priority\n",
        "the least important goes first",
    ),
    Mutant(
        "young-instead-of-old",
        POLICY,
        "max_tokens + (self._config.sjf_ageing or 1) * step",
        "max_tokens - (self._config.sjf_ageing or 1) * step",
        "under sjf a long job starves",
    ),
    Mutant(
        "job-without-its-prompt",
        POLICY,
        "request.sequences[0].max_tokens + (",
        "request.sequences[0].max_tokens - request.num_prompt + (",
        "under sjf a long prompt with a short answer goes first",
    ),
    Mutant(
        "queue-in-order-of-return",
        QUEUES,
        "    insort(queue, seq, key=_KEY)",
        "    queue.append(seq)",
        "a preempted sequence waits behind later arrivals",
    ),
    Mutant(
        "neighbour-dequeued",
        QUEUES,
        "    is_there = index < len(queue) and queue[index] is seq",
        "    is_there = index < len(queue)",
        "a choice that ends before the fork removes another request from the queue",
    ),
)

# Shares of clients.

SHARES = (
    Mutant(
        "turns-never-end",
        FAIR,
        "        return gone >= self._turn",
        "        return False",
        "a client waits until another one's answers end",
    ),
    Mutant(
        "turns-without-progress",
        FAIR,
        "gone = seq.num_tokens - num_tokens if is_first else step - first_step",
        "gone = step - first_step",
        "two clients whose prompts do not fit together preempt each other for ever",
    ),
    Mutant(
        "no-turns",
        FAIR,
        "        return gone >= self._turn",
        "        return True",
        "sequences are preempted again right after they return",
    ),
    Mutant(
        "poorest-makes-way",
        FAIR,
        "richest = max(shares,",
        "richest = min(shares,",
        "a client loses its only seat beside one that has many",
    ),
    Mutant(
        "seats-change-hands-for-ever",
        FAIR,
        "if has_had_turn and wanted <= self._share_of(richest, queue):",
        "if has_had_turn:",
        "clients with equal shares take seats from each other",
    ),
    Mutant(
        "parts-ignored",
        BUDGET,
        "        return min(self.left, self.parts.get(request.client, 0))",
        "        return self.left",
        "one client's prompts take every step's tokens",
    ),
    Mutant(
        "part-not-passed-on",
        BUDGET,
        "        total -= parts[key]\n        weight -= weights[key]\n",
        "",
        "tokens of a step are unused, or given out twice",
    ),
    Mutant(
        "choices-take-freed-seats",
        FAIR,
        "(first.request.client != client or first.key < seq.key)",
        "first.key < seq.key",
        "the seat for which a sequence was preempted goes to its sibling",
    ),
    Mutant(
        "quota-without-forks",
        FAIR,
        "min(seats.num_free, most - seats.held[client])",
        "seats.num_free",
        "a request of many choices passes its client's max_num_seqs",
    ),
    Mutant(
        "quota-off-by-one",
        FAIR,
        "return most is None or held[client] < most",
        "return most is None or held[client] <= most",
        "a client runs one sequence more than its max_num_seqs",
    ),
    Mutant(
        "weightless",
        FAIR,
        "due / self._quota(request.client).weight",
        "due",
        "a client's weight does not change how much it is served",
    ),
    Mutant(
        "idle-clients-save-up",
        FAIR,
        "                self.served[client] = max(self.served[client], floor)\n"
        "                if len(",
        "                if len(",
        "a client that was idle keeps all others waiting",
    ),
    Mutant(
        "preempts-in-vain",
        PLACES,
        "                return victims[:count]\n        return []\n",
        "                return victims[:count]\n        return victims\n",
        "sequences are preempted for one that does not fit even so",
    ),
    Mutant(
        "launches-over-a-turn",
        SCHEDULER,
        "        may_admit = victims or (head and self._seats.num_free)",
        "        may_admit = head and self._seats.num_free",
        "on a GPU a client waits until another one's answers end",
    ),
)

# Rows, and what the runner is told.

ROWS = (
    Mutant(
        "row-not-freed",
        SEATS,
        "        heapq.heappush(self._free, table.row)\n",
        "",
        "after max_num_seqs requests nobody is admitted any more",
    ),
    Mutant(
        "row-remembers-who-left",
        SEATS,
        "        del self.rows[table.row]\n",
        "",
        "finished sequences stay in memory",
    ),
    Mutant(
        "new-row-of-who-left",
        SEATS,
        "        self._new.pop(table.row, None)\n",
        "",
        "a sequence that left before its first step is announced to the runner",
    ),
    Mutant(
        "rows-announced-again",
        SEATS,
        "        self._new.clear()\n",
        "",
        "every step sends every prompt to the runner",
    ),
    Mutant(
        "moves-handed-out-twice",
        MANAGER,
        "        moves, self._moves = self._moves, Moves()\n        return moves",
        "        return self._moves",
        "a move is made again after its blocks changed hands",
    ),
    Mutant(
        "moves-of-a-broken-step-stay",
        MANAGER,
        "        self._moves = Moves()\n        for block_id, node in",
        "        for block_id, node in",
        "blocks are moved for sequences that lost them when the step was broken off",
    ),
)

# Preemption and swapping.

SWAPPING = (
    Mutant(
        "swap-off-by-one",
        MANAGER,
        "        host_ids = host.block_ids[index:]",
        "        host_ids = host.block_ids[index + 1 :]",
        "a sequence comes back with its blocks in the wrong places",
    ),
    Mutant(
        "host-blocks-kept-after-import",
        MANAGER,
        "        self._host_pool.decref(*host.block_ids)\n        self.stats",
        "        self.stats",
        "the host's pool fills up for ever",
    ),
    Mutant(
        "host-blocks-kept-after-abort",
        SCHEDULER,
        "            self._drop_host(seq)\n        else",
        "            pass\n        else",
        "each abort of a swapped-out request loses host blocks",
    ),
    Mutant(
        "host-blocks-kept-after-a-broken-step",
        SCHEDULER,
        "else seq.num_lost\n            self._drop_host(seq)",
        "else seq.num_lost",
        "a sequence is swapped in from blocks that were never written",
    ),
    Mutant(
        "exports-of-a-broken-step-trusted",
        SCHEDULER,
        "        for seq in self._preempted:\n",
        "        for seq in []:\n",
        "the same: preempt_all does not know what this step exported",
    ),
    Mutant(
        "old-exports-mistrusted",
        SCHEDULER,
        "        self._preempted = []\n        head",
        "        head",
        "a broken step throws away what earlier steps swapped out",
    ),
    Mutant(
        "broken-step-exports",
        SCHEDULER,
        "        if by and self._config.preemption_mode",
        "        if self._config.preemption_mode",
        "what a broken step may have left half-written is kept",
    ),
    Mutant(
        "full-host-pool-not-refused",
        MANAGER,
        "        if num_blocks > self._host_pool.num_free:\n            return None\n",
        "",
        "a full host pool ends the engine",
    ),
    Mutant(
        "last-host-block-unused",
        MANAGER,
        "        if num_blocks > self._host_pool.num_free:\n            return None\n",
        "        if num_blocks >= self._host_pool.num_free:\n            return None\n",
        "a swap that fits is computed again instead",
    ),
    Mutant(
        "only-private-blocks-exported",
        MANAGER,
        "        self._moves.exports.extend(zip(table.block_ids, host_ids, strict=False))",
        "        pairs = list(zip(table.block_ids, host_ids, strict=False))\n"
        "        self._moves.exports.extend(pairs[table.num_committed :])",
        "a shared block that is evicted while its sequence waits comes back empty",
    ),
    Mutant(
        "empty-blocks-exported",
        MANAGER,
        "        num_blocks = self.blocks_for(table.num_tokens)\n",
        "        num_blocks = len(table.block_ids)\n",
        "a half-computed prompt fills the host's pool with nothing",
    ),
    Mutant(
        "nothing-swapped-out",
        SCHEDULER,
        'self._config.preemption_mode == "swap" and seq.num_lost:',
        'self._config.preemption_mode == "swap":',
        "a sequence that has computed nothing counts as swapped",
    ),
    Mutant(
        "copy-over-import",
        MANAGER,
        "            if self._shares_partial and host is None:",
        "            if self._shares_partial:",
        "a swapped-in block is overwritten by one that only begins alike",
    ),
    Mutant(
        "cache-less-than-host-believed",
        MANAGER,
        "max(num_computed, source.num_tokens if source else 0)",
        "source.num_tokens if source else num_computed",
        "cached tokens beyond what was swapped out are computed again, into shared blocks",
    ),
)

# How a sequence ends.

ENDINGS = (
    Mutant(
        "decode-one-token-too-long",
        SCHEDULER,
        "len(seq.token_ids) >= seq.max_tokens",
        "len(seq.token_ids) > seq.max_tokens",
        "max_tokens + 1 tokens come out",
    ),
    Mutant(
        "answer-beyond-the-context",
        SEQUENCE,
        "longest = min(longest, self.num_prompt + self.params.max_tokens)",
        "longest = self.num_prompt + self.params.max_tokens",
        "a sequence outgrows the context or the pool, and waits for ever",
    ),
    Mutant(
        "one-token-less-than-fits",
        SCHEDULER,
        "manager.num_blocks * manager.block_size + 1)",
        "manager.num_blocks * manager.block_size)",
        "the last token, whose keys need no slot, is not generated",
    ),
    Mutant(
        "ended-inside-forced-tokens",
        SEQUENCE,
        "is_forced = self.num_generated <= len(request.params.trace_decode_token_ids or ())",
        "is_forced = False",
        "a forced stop token ends the sequence",
    ),
    Mutant(
        "last-forced-token-may-end",
        SEQUENCE,
        "is_forced = self.num_generated <= len(request.params.trace_decode_token_ids or ())",
        "is_forced = self.num_generated < len(request.params.trace_decode_token_ids or ())",
        "the last forced token ends the sequence if it is a stop token",
    ),
    Mutant(
        "ended-twice",
        SCHEDULER,
        "        if seq.finish_reason is not None:\n            return",
        "        pass",
        "an abort after the end changes how it ended",
    ),
    Mutant(
        "aborted-but-still-waiting",
        SCHEDULER,
        "        elif self._dequeue(seq):",
        "        elif seq in self.waiting:",
        "an aborted request is served",
    ),
)

# Numbers that are shown.

NUMBERS = (
    Mutant(
        "recomputed-not-counted",
        OPENING,
        "            metrics.num_recomputed_tokens += max(0, seq.num_lost - room.num_computed)\n",
        "",
        "preemption looks free",
    ),
    Mutant(
        "recomputed-counts-hits-too",
        OPENING,
        "max(0, seq.num_lost - room.num_computed)",
        "seq.num_lost",
        "preemption looks dearer than it is: what the cache kept counts as computed again",
    ),
    Mutant(
        "swapped-counts-as-lost",
        SCHEDULER,
        "            seq.num_lost = 0\n",
        "",
        "the event log says that a swap lost its tokens",
    ),
    Mutant(
        "query-counted-at-each-admission",
        OPENING,
        '            self._emit(("resume", *event,',
        '            self._count_query(seq, room)\n            self._emit(("resume", *event,',
        "the hit rate rises with every preemption",
    ),
    Mutant(
        "kept-blocks-never-go",
        OPENING,
        "        oldest = [*self.kept][:1]",
        "        oldest = []",
        "what is kept for beams is not given back when blocks are short",
    ),
    Mutant(
        "kept-partial-block-not-counted",
        MANAGER,
        "num_shared = parent.num_tokens // self.block_size if parent else len(path)",
        "num_shared = len(parent.block_ids) if parent else len(path)",
        "a beam is opened although no block is left for the copy at its first write",
    ),
    Mutant(
        "branch-of-another-tenant",
        OPENING,
        "is_same = parent.request.cache_salt == request.cache_salt",
        "is_same = True",
        "a beam forks the blocks of another tenant",
    ),
    Mutant(
        "branch-of-other-tokens",
        OPENING,
        "if not is_same or parent.token_ids[:num_stored] != seq.token_ids[:num_stored]:",
        "if not is_same:",
        "a request forks the blocks of tokens that are not its own",
    ),
    Mutant(
        "full-and-partial-hits-swapped",
        OPENING,
        "stats.add_query(*query)",
        "stats.add_query(query[0], query[2], query[1])",
        "the two kinds of hits are each other's",
    ),
    Mutant(
        "fork-counts-empty-slots-again",
        MANAGER,
        "        self._num_counted_twice += self._num_empty_in_last(table)\n",
        "",
        "the empty slots of a shared block are counted for each choice",
    ),
    Mutant(
        "copy-counts-empty-slots-once",
        MANAGER,
        "            self._num_counted_twice -= self._num_empty_in_last(table)\n"
        '            self._put("alloc"',
        '            self._put("alloc"',
        "the empty slots of a copied block are not counted",
    ),
    Mutant(
        "leaving-keeps-its-empty-slots",
        MANAGER,
        "        if table.block_ids and self._pool.refcount(table.block_ids[-1]) > 1:",
        "        if False:",
        "fragmentation sinks below zero with every forked request",
    ),
    Mutant(
        "shared-blocks-not-counted",
        MANAGER,
        "            self.stats.num_shared_blocks += len(block_ids)\n",
        "            pass\n",
        "prefix hits and merges save nothing, it seems",
    ),
    Mutant(
        "pinned-counts-as-used-twice",
        MANAGER,
        "        return self._num_entries - (self.num_used - len(alone))",
        "        return self._num_entries - self.num_used",
        "in a step with a partial hit sharing saves less than nothing",
    ),
    Mutant(
        "decoded-tokens-not-counted",
        MANAGER,
        "        self._num_stored += len(tables)\n",
        "",
        "fragmentation grows with every token",
    ),
    Mutant(
        "prompt-scored-twice",
        SEQUENCE,
        "scored = (max(start, first), ",
        "scored = (start, ",
        "after a preemption prompt log-probabilities are returned again",
    ),
)

# What is launched ahead.

AHEAD_OF_STEPS = (
    Mutant(
        "ahead-of-a-prompt",
        SCHEDULER,
        "if len(plan.decodes) < len(self.running) or may_admit:",
        "if may_admit:",
        "a step is launched although the one before it ends a prompt",
    ),
    Mutant(
        "ahead-of-an-admission",
        SCHEDULER,
        "if len(plan.decodes) < len(self.running) or may_admit:",
        "if len(plan.decodes) < len(self.running):",
        "who waits is kept waiting by steps that were launched before it could be admitted",
    ),
    Mutant(
        "admitted-to-a-launched-step",
        SCHEDULER,
        "if may_admit and self._may_admit(len(victims)):",
        "if self._may_admit(len(victims)):",
        "a prompt is planned into a step that is on its way without it",
    ),
    Mutant(
        "ahead-without-a-slot",
        AHEAD,
        "if any(table.num_tokens + 2 > table.num_writable for table in tables):",
        "if False:",
        "a token is written where the table ends",
    ),
    Mutant(
        "ahead-beyond-the-end",
        AHEAD,
        "return seq.num_tokens + 1 < seq.max_tokens",
        "return True",
        "a sequence that ends by its length is computed once more, in vain",
    ),
)

# Starting again.

REBUILDING = (
    Mutant(
        "logprobs-after-the-token",
        SCHEDULER,
        "            if row is not None:\n                seq.logprobs.append(row)\n"
        "            seq.token_ids.append(token_id)\n",
        "            seq.token_ids.append(token_id)\n"
        "            if row is not None:\n                seq.logprobs.append(row)\n",
        "after an interrupt a token has no log-probability",
    ),
    Mutant(
        "reason-before-its-detail",
        SCHEDULER,
        "        seq.stop_reason = stop_reason\n        seq.finish_reason = reason\n",
        "        seq.finish_reason = reason\n        seq.stop_reason = stop_reason\n",
        "after an interrupt nobody knows which string stopped an answer",
    ),
    Mutant(
        "end-goes-unnoticed",
        SEQUENCE,
        "reason, self.stop_reason = self.ending or (None, None)",
        "reason, self.stop_reason = (None, None)",
        "after an interrupt an answer goes on beyond its end",
    ),
    Mutant(
        "logprob-without-its-token-kept",
        SEQUENCE,
        "        del self.logprobs[self.num_generated :]",
        "        #",
        "after an interrupt log-probabilities are those of other tokens",
    ),
    Mutant(
        "rebuilt-over-old-blocks",
        SCHEDULER,
        "        self.manager.reset()\n        self._clear()\n",
        "        self._clear()\n",
        "every interrupt costs blocks",
    ),
    Mutant(
        "rebuilt-over-old-queues",
        SCHEDULER,
        "        self.manager.reset()\n        self._clear()\n",
        "        self.manager.reset()\n",
        "an interrupt leaves sequences that run without blocks",
    ),
    Mutant(
        "swapped-out-remembered",
        SEQUENCE,
        "        self.table = self.host = None\n",
        "        self.table = None\n",
        "host blocks that were given away are read",
    ),
    Mutant(
        "led-choices-queued",
        SEQUENCE,
        "        return live if leader is None else [leader]",
        "        return live",
        "every choice computes the prompt after an interrupt, and forks",
    ),
    Mutant(
        "hit-rate-kept",
        MANAGER,
        "        self.stats.reset_hit_rate()\n",
        "",
        "the hit rate tells of a cache that is gone",
    ),
)

MUTANTS = (
    *COUNTS,
    *FORKS,
    *HITS,
    *PINS,
    *EVICTION,
    *ROOM,
    *STEPS,
    *SHARES,
    *ROWS,
    *SWAPPING,
    *ENDINGS,
    *NUMBERS,
    *AHEAD_OF_STEPS,
    *REBUILDING,
    *JIT_MUTANTS,
)
