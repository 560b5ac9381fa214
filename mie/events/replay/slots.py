"""Track the slots of recurrent states: of running sequences, of snapshots, and on the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mie.events import Seq
from mie.events.replay.blocks import require


class SlotState:
    """The owner of each slot."""

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        """Load the part of a snapshot that concerns states.

        Raises:
            TraceError: a slot has two owners, or does not exist.
        """
        self.num_slots: int = snapshot["num_slots"]
        self.num_host_slots: int = snapshot["num_host_slots"]
        self.running: dict[Seq, int] = {}
        self.saved: dict[int, int] = {}
        """The slots of snapshots, by the block of their node."""
        self.hosts: dict[Seq, int] = {}
        self._used: set[int] = set()
        for seq, slot in snapshot["running"].items():
            self.state(seq, slot)
        for block, slot in snapshot["saved"].items():
            self.save(block, slot)
        for seq, slot in snapshot["hosts"].items():
            self.save_host(seq, slot)

    def snapshot(self) -> dict[str, Any]:
        """Return the slots' part of a snapshot."""
        return {
            "num_slots": self.num_slots,
            "num_host_slots": self.num_host_slots,
            "running": dict(self.running),
            "saved": dict(self.saved),
            "hosts": dict(self.hosts),
        }

    def owners(self) -> dict[int, Seq | int]:
        """Return the owner of each slot in use: a running sequence, or a snapshot's block."""
        owners: dict[int, Seq | int] = {slot: seq for seq, slot in self.running.items()}
        return owners | {slot: block for block, slot in self.saved.items()}

    def state(self, seq: Seq, slot: int) -> None:
        """Give a running sequence a slot."""
        require(seq not in self.running, "it already has a slot")
        self._take(slot)
        self.running[seq] = slot

    def revert(self, seq: Seq, slot: int) -> None:
        """Give a running sequence the slot with the state before a step, in place of its own."""
        self.close(seq)
        self.state(seq, slot)

    def save(self, block: int, slot: int) -> None:
        """Give a node of the prefix tree a snapshot."""
        require(block not in self.saved, "it already has a snapshot")
        self._take(slot)
        self.saved[block] = slot

    def forget(self, block: int) -> None:
        """Drop the snapshot of a node."""
        require(block in self.saved, "it has no snapshot")
        self._used.remove(self.saved.pop(block))

    def save_host(self, seq: Seq, slot: int) -> None:
        """Give a swapped-out sequence a slot of the host."""
        require(seq not in self.hosts, "its state is already on the host")
        require(0 <= slot < self.num_host_slots, f"the host has no slot {slot}")
        require(slot not in self.hosts.values(), f"slot {slot} of the host is in use")
        self.hosts[seq] = slot

    def close(self, seq: Seq) -> None:
        """Release the slot of a running sequence."""
        require(seq in self.running, "it has no slot")
        self._used.remove(self.running.pop(seq))

    def leave_host(self, seq: Seq) -> None:
        """Release the host's slot of a sequence."""
        require(seq in self.hosts, "its state is not on the host")
        del self.hosts[seq]

    def check(self, running: Collection[Seq], tree: Collection[int]) -> None:
        """Raise `TraceError` unless the owners are all running sequences, and nodes of the tree."""
        require(self.running.keys() >= {*running}, "a running sequence has no slot")
        self.check_owners(running, tree)

    def check_owners(self, running: Collection[Seq], tree: Collection[int]) -> None:
        """Raise `TraceError` unless the owners are running sequences, and nodes of the tree."""
        require(self.running.keys() <= {*running}, "a slot is of a sequence that does not run")
        require(self.saved.keys() <= {*tree}, "a snapshot is of a block that is not in the tree")

    def _take(self, slot: int) -> None:
        require(0 <= slot < self.num_slots, f"there is no slot {slot}")
        require(slot not in self._used, f"slot {slot} is in use")
        self._used.add(slot)
