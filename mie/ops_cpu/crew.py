"""Decide in which steps helper processes share the work, and start them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from mie.ops_cpu.allocator import CachingAllocator
from mie.ops_cpu.attention.attention import Attention
from mie.ops_cpu.attention.shared import SharedAttention
from mie.ops_cpu.linear.shared import SharedProducts
from mie.ops_cpu.linear.tiled import TiledPlan
from mie.ops_cpu.processes import helpers
from mie.ops_cpu.processes.helpers import HelperProcesses, unpack
from mie.ops_cpu.threads.workers import Workers
from mie.system.resources import available_cpus

logger = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Maximum number of tokens of a small step. Threads share larger ones, whose work is longer."""
START_BYTES = 1 << 31
"""Bytes of weights that small steps read before helpers start, which takes some milliseconds."""
MAX_TASKS = 1 << 12
"""Number of products that are kept ready."""
_PRODUCT, _ATTENTION = range(2)


class Crew:
    """Decides who shares the work of a step: helper processes if it is small, and threads if not.

    In a small step the threads rest, because both would spin-wait on the same CPUs.
    """

    def __init__(
        self, workers: Workers, plan: TiledPlan, attention: Attention, allocator: CachingAllocator
    ) -> None:
        self._workers, self._plan, self._attention = workers, plan, attention
        self._allocator = allocator
        # A helper that spins would hold up another one on the same CPU.
        self._may_start = helpers.IS_AVAILABLE and 1 < workers.num_threads <= available_cpus()
        self._num_bytes = 0
        self._team: _Team | None = None

    def begin_step(self, num_tokens: int) -> None:
        """Decide for a step of so many tokens."""
        self._use(self._find_team() if num_tokens <= MAX_TOKENS else None)

    def close(self) -> None:
        """End the helper processes. Another small step may start others."""
        self._use(None)
        team, self._num_bytes = self._team, 0
        if team is not None:
            team.close()
        self._team = None

    def __del__(self) -> None:
        if hasattr(self, "_team"):
            self.close()

    def _use(self, team: _Team | None) -> None:
        self._workers.are_resting = team is not None
        self._plan.shared = None if team is None else team.products
        self._attention.share_by(None if team is None else team.attention)

    def _find_team(self) -> _Team | None:
        """Return the helpers, started if it is time, or None if there are none."""
        if self._team is not None and not self._team.is_usable:
            self._may_start = not self._team.helpers.have_failed
            self.close()
        if self._team is None and self._may_start:
            num_bytes = sum(matrix.nbytes for matrix in self._plan.matrices())
            self._num_bytes += num_bytes
            if num_bytes and self._num_bytes >= START_BYTES:
                self._start()
        return self._team

    def _start(self) -> None:
        num_processes = self._workers.num_threads
        try:
            self._team = _Team(self._plan, self._attention, self._allocator, num_processes)
        except (OSError, MemoryError) as error:
            self._may_start = False
            logger.warning(
                "helper processes could not be started; mie goes on without them: %r", error
            )


class _Team:
    """Helper processes, with what they share."""

    def __init__(
        self,
        plan: TiledPlan,
        attention: Attention,
        allocator: CachingAllocator,
        num_processes: int,
    ) -> None:
        """Start them. They know the matrices and the KV cache that exist by now."""
        # Linux breaks a huge page up when this process writes to it after a fork. So the children
        # get no working memory, and this process takes new huge pages.
        for owner in (plan, attention, allocator):
            owner.release()
        self._plan, self._attention = plan, attention
        self._num_loaded, self._cache = plan.num_loaded, attention.cache
        self.products = SharedProducts(plan, allocator, kind=_PRODUCT, max_rows=MAX_TOKENS)
        self.attention: SharedAttention | None = None
        if attention.cache is not None:
            self.attention = SharedAttention(
                attention, kind=_ATTENTION, max_rows=MAX_TOKENS, num_processes=num_processes
            )
        self._tasks: dict[bytes, Callable[[], object]] = {}
        # The helpers do not refer to this object, so it is freed as soon as it is closed.
        do = partial(_do, self.products, self.attention, self._tasks)
        self.helpers = HelperProcesses(num_processes - 1, do)
        self.products.helpers = self.helpers
        if self.attention is not None:
            self.attention.helpers = self.helpers

    @property
    def is_usable(self) -> bool:
        """Whether the helpers are alive and know what this process works with."""
        return (
            self.helpers.are_usable
            and self._num_loaded == self._plan.num_loaded
            and self._cache is self._attention.cache
        )

    def close(self) -> None:
        """End the helpers, and free what the program no longer uses."""
        self.helpers.close()
        self._tasks.clear()
        self.products.close()
        if self.attention is not None:
            self.attention.helpers = None


def _do(
    products: SharedProducts,
    attention: SharedAttention | None,
    tasks: dict[bytes, Callable[[], object]],
    message: bytes,
) -> None:
    """Do what a message says, in any of the processes. ``tasks`` are the products done before."""
    kind, *numbers = unpack(message)
    if kind == _ATTENTION:
        assert attention is not None
        attention.do(*numbers[:5])
        return
    if message not in tasks:
        if len(tasks) >= MAX_TASKS:
            tasks.clear()
        tasks[message] = products.bind(*numbers[:4])
    tasks[message]()
