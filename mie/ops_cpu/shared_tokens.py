"""Share the tokens of a large step among processes.

Most operators compute each token by itself. So each process runs the forward pass for its own
tokens. Processes meet where tokens depend on each other: twice in each layer, because attention
reads the queries, keys and values of all tokens, and once before the logits.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops.backend import StepBatch
from mie.ops_cpu.allocator import shared_zeros
from mie.ops_cpu.attention.shared import SharedAttention
from mie.ops_cpu.linear.geometry import MAX_GROUP
from mie.ops_cpu.linear.shared import SharedProducts, slices_of
from mie.ops_cpu.linear.tiled import TiledPlan
from mie.ops_cpu.processes.helpers import HelperProcesses


class SharedTokens:
    """Divides the tokens of a step. `SharedProducts` shares the products of the logits."""

    def __init__(
        self,
        plan: TiledPlan,
        helpers: HelperProcesses,
        products: SharedProducts,
        attention: SharedAttention,
        max_logits: int,
    ) -> None:
        """Take the memory for ``max_logits`` rows of logits. ``helpers`` are forked afterwards."""
        self._plan, self._helpers = plan, helpers
        self._products, self._attention = products, attention
        self._max_logits = max_logits
        inputs = {(each.layout, each.tiles.shape[1]) for each in plan.matrices()}
        # A token's bits must not depend on which process computes it.
        self._unit = math.lcm(*(layout.row_unit(num_inputs) for layout, num_inputs in inputs))
        self._rows = shared_zeros((max_logits * max(size for _, size in inputs),), plan.dtype)
        self._own = slice(0)

    def takes(self, batch: StepBatch) -> bool:
        """Return whether it can share this step."""
        if not self._unit or len(batch.logits_rows) > self._max_logits:
            return False
        shares = self._shares(len(batch.token_ids))
        # Fewer rows may be multiplied in longer calls, which changes bits (`tiles_at_once`).
        least: int = min(own.stop - own.start for own in shares)
        return least > MAX_GROUP

    def begin(self, batch: StepBatch) -> StepBatch:
        """Begin a step, and return it with this process's tokens of all sequences."""
        num_tokens = len(batch.token_ids)
        self._own = own = self._shares(num_tokens)[self._helpers.rank]
        self._attention.part = own, num_tokens
        self._plan.shared, self._plan.by_token = None, self
        return replace(
            batch,
            token_ids=batch.token_ids[own],
            positions=batch.positions[own],
            slot_mapping=batch.slot_mapping[own],
        )

    def take_rows(self, x: Floats, rows: Ints) -> Floats:
        """Return these rows of all tokens. x [T, D] has the tokens of this process.

        From here on, each process computes all rows, and their products are shared.
        """
        taken = self._rows[: len(rows) * x.shape[1]].reshape(-1, x.shape[1])
        is_own = (rows >= self._own.start) & (rows < self._own.stop)
        taken[is_own] = x.take(rows[is_own] - self._own.start, 0)
        self._helpers.meet()
        self.end()
        self._plan.shared = self._products
        return taken

    def end(self) -> None:
        """Stop sharing tokens."""
        self._attention.part = self._plan.by_token = None

    def _shares(self, num_tokens: int) -> list[slice]:
        """Return the tokens of each process."""
        shares = slices_of(ceil_div(num_tokens, self._unit), self._helpers.ends)
        ends = [min(own.stop * self._unit, num_tokens) for own in shares]
        return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
