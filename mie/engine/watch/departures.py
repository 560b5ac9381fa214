"""Find the token at which a prompt departs from the prefix cache, and the reason."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from mie.base.stats.departure import Departure
from mie.engine.engine import Engine
from mie.engine.watch.candidates import Candidates
from mie.errors import shown_text
from mie.memory.layers.states import States
from mie.memory.prefix import Node, num_common
from mie.sched.sequence import Sequence as Seq

logger = logging.getLogger(__name__)

MAX_PLACES = 256
"""Number of places that are counted for `REPEATED`."""
NUM_SHOWN = 8
"""Number of tokens that are shown where a prompt departs."""
REPEATED = 3
"""A warning comes when prompts of one client depart in one block so many times."""
EARLY = 0.25
"""The warning is for departures in the first quarter of a prompt, because most is lost there."""
RESUMED, NEAR = 8, 64
"""Two prompts are one prompt with a change if so many tokens in a row are equal near the change."""


class Departures:
    """Looks at the sequences that may be admitted next, before each step."""

    def __init__(self, emit: Callable[[tuple[Any, ...]], None]) -> None:
        """``emit`` gets a record of the event log for each departure."""
        self._emit = emit
        self._paths: dict[int, int] = {}  # the hash of the path to a block, by block
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self._places: OrderedDict[tuple[str | None, str | None, int], int] = OrderedDict()

    def connect(self, engine: Engine, is_slow: Callable[[Seq], bool]) -> None:
        """Look at the sequences of an engine before each step.

        ``is_slow``: blocks are on a disk, and computing them is faster than reading them.
        """
        scheduler = engine.scheduler
        self._candidates, self._manager = Candidates(scheduler), scheduler.manager
        self._is_slow = is_slow
        engine.before_step.append(self.before_step)

    def note(self, record: tuple[Any, ...]) -> None:
        """Note the blocks that enter and leave the prefix tree."""
        if record[0] == "seal":
            _, block_id, parent, salt, tokens = record
            path = hash((self._paths.get(parent, salt), tokens))
            self._paths[block_id] = path
            self._evicted.pop(path, None)
        elif record[0] == "evict":
            path = self._paths.pop(record[1], 0)
            self._evicted[path] = None
            if len(self._evicted) > self._manager.num_blocks:  # as many as the pool can hold
                self._evicted.popitem(last=False)

    def before_step(self) -> None:
        """Find the departures of the sequences that may be admitted next."""
        for seq in self._candidates.take():
            if seq.was_admitted:
                continue
            seq.request.metrics.departure = found = self._departure(seq)
            if found is not None:
                place = found.position, found.reason, found.cached, found.got, found.nearest
                self._emit(("depart", seq.seq_id, *place))
                self._warn_of_repetition(seq, found)

    def _departure(self, seq: Seq) -> Departure | None:
        """Return where a sequence departs from the cache, or None if its full blocks are cached."""
        manager, size, salt = self._manager, self._manager.block_size, seq.request.cache_salt
        tokens, limit = seq.token_ids, len(seq.token_ids) - 1
        path = manager.prefix.match(tokens, limit, salt)
        usable = path
        for part in manager.parts:
            usable = part.usable(usable, seq.host)
        on_host = 0 if seq.host is None else seq.host.num_tokens
        position = max(len(usable) * size, on_host)
        if position >= limit // size * size:
            return None
        cached: tuple[int, ...] = ()
        nearest: int | None = None
        rest = tuple(tokens[position : position + size])
        if self._is_slow(seq):
            reason = "slow disk"
        elif len(path) * size > position:
            has_states = manager.part(States) is not None
            reason = "no snapshot" if has_states else "window passed"
        elif on_host > len(path) * size:
            reason = "new"  # the tree does not reach as far as the blocks from a disk
        elif child := self._nearest(path[-1] if path else manager.prefix.roots.get(salt), rest):
            num_equal = num_common(child.tokens, rest)
            cached = child.tokens[num_equal : num_equal + NUM_SHOWN]
            reason, position, nearest = "other tokens", position + num_equal, child.block_id
        else:
            reason = self._absence(seq, path, rest)
        got = tuple(tokens[position : position + NUM_SHOWN])
        return Departure(position, seq.num_tokens, reason, cached, got, nearest)

    def _nearest(self, node: Node | None, tokens: tuple[int, ...]) -> Node | None:
        """Return the child that begins with the most of these tokens, if there is any."""
        if node is None or not node.children:
            return None
        at = bisect_left(node.sorted_tokens, tokens)
        near = node.sorted_tokens[max(0, at - 1) : at + 1]
        return node.children[max(near, key=lambda each: num_common(each, tokens))]

    def _absence(self, seq: Seq, path: Sequence[Node], rest: tuple[int, ...]) -> str:
        """Return why no block follows a path."""
        salt, block_id = seq.request.cache_salt, path[-1].block_id if path else None
        above = salt if block_id is None else self._paths.get(block_id)
        if hash((above, rest)) in self._evicted:
            return "evicted"
        others = self._manager.prefix.roots.keys() - {salt}
        end = (len(path) + 1) * self._manager.block_size
        match = self._manager.prefix.match
        if any(len(match(seq.token_ids, end, other)) > len(path) for other in islice(others, 64)):
            return "other salt"
        return "new"

    def _warn_of_repetition(self, seq: Seq, found: Departure) -> None:
        """Log a line when prompts with a change depart early, again and again, at one place."""
        if found.reason != "other tokens" or found.position > EARLY * found.num_prompt:
            return
        if not self._is_changed(seq, found.position):
            return
        request = seq.request
        place = request.client, request.cache_salt, found.position // self._manager.block_size
        count = self._places[place] = self._places.pop(place, 0) + 1
        if len(self._places) > MAX_PLACES:
            self._places.popitem(last=False)
        if count == REPEATED:
            logger.warning(
                "%d prompts%s were computed again from token %d of %d on, because they differ "
                "there from cached prompts (move what changes, such as a date or a counter, to "
                "the end, or leave changing lines of system messages out by ignore_prompt_lines)",
                count,
                "" if request.client is None else f" of {shown_text(request.client)}",
                found.position,
                found.num_prompt,
            )

    def _is_changed(self, seq: Seq, position: int) -> bool:
        """Whether the prompt and the nearest cached one have a text in common after a change."""
        prefix, tokens, salt = self._manager.prefix, seq.token_ids, seq.request.cache_salt
        path = prefix.match(tokens, position, salt)
        rest = tokens[len(path) * self._manager.block_size :]
        node = self._nearest(path[-1] if path else prefix.roots.get(salt), tuple(rest[:NEAR]))
        cached: list[int] = []
        while node and len(cached) < NEAR:
            cached += node.tokens
            node = next(iter(node.children.values()), None)
        return not _runs(cached).isdisjoint(_runs(tokens[position + 1 : position + NEAR]))


def _runs(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[i : i + RESUMED]) for i in range(len(tokens) - RESUMED + 1)}
