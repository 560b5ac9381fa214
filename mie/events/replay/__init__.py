"""Rebuild queues and blocks at any step from the event log.

This room knows records and snapshots, and calls neither the scheduler nor the allocator. When its
state equals their snapshots, the records are complete. So it is strict and refuses records that
cannot have happened.
"""

from mie.events.replay.blocks import NodeState
from mie.events.replay.state import SequenceState, State
from mie.events.replay.walk import at, walk

__all__ = ["NodeState", "SequenceState", "State", "at", "walk"]
