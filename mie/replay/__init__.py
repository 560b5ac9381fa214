"""Queues and blocks at any step, rebuilt from the event log.

This room knows records and snapshots. It calls neither the scheduler nor the allocator: that their
snapshots equal what it makes of their records shows that the records tell all. So it is strict, and
refuses whatever cannot have happened.
"""

from mie.replay.blocks import NodeState
from mie.replay.state import SequenceState, State
from mie.replay.walk import at, walk

__all__ = ["NodeState", "SequenceState", "State", "at", "walk"]
