"""Provide hand-made event logs for tests without an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mie.events import SUMMARY_FIELDS, EventLog, Record

A, A1, B, C, D, E, F, G = (0, 0), (0, 1), *((number, 0) for number in range(1, 7))

EMPTY: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 8,
    "num_host_blocks": 4,
    "waiting": [],
    "running": [],
    "sequences": {},
    "refs": {},
    "tree": {},
}


REBUILT: dict[str, Any] = {
    "waiting": [B, C],
    "running": [],
    "sequences": {
        seq: {
            "request_id": request_id,
            "rank": 0,
            "n": 1,
            "num_prompt": num_prompt,
            "max_tokens": max_tokens,
            "num_tokens": num_tokens,
            "num_computed": 0,
            "row": None,
            "blocks": [],
            "host": None,
        }
        for seq, request_id, num_prompt, max_tokens, num_tokens in (
            (B, "b", 5, None, 7),
            (C, "c", 7, 20, 11),
        )
    },
    "refs": {},
    "tree": {},
}
"""The snapshot of a rebuild, which keeps only the tokens."""

STORY: list[list[Record]] = [
    # A has two choices, computes its prompt and forks. The budget cuts B.
    [
        ("add", "a", 0, 0, 6, 2, 3),
        ("add", "b", 1, 0, 5, 1, None),
        ("admit", A, 0, 6, 0),
        ("alloc", A, 0, (0, 1)),
        ("admit", B, 1, 5, 0),
        ("alloc", B, 0, (2, 3)),
        ("rank", B, 0),
        ("prefill", A, 0, 6, (0, 1)),
        ("seal", 0, None, None, (10, 11, 12, 13)),
        ("fork", A1, A, 2),
        ("prefill", B, 0, 3, ()),
    ],
    # A writes into the block that it shares with its other choice: copy, decref, swap.
    [
        ("alloc", A, 1, (4,)),
        ("copy", 1, 4, A, "fork"),
        ("release", A, (1,)),
        ("decode", (0, 2)),
        ("prefill", B, 3, 2, (0,)),
        ("seal", 2, None, None, (20, 21, 22, 23)),
    ],
    # B is swapped out. Both choices of A end; their blocks stay in the tree.
    [
        ("export", B, (0, 1)),
        ("close", B),
        ("preempt", B, A1, "swap", "last arrived", 0),
        ("decode", (0, 2)),
        ("seal", 4, 0, None, (14, 15, 16, 17)),
        ("close", A),
        ("finish", A, "length"),
        ("seal", 1, 0, None, (14, 15, 18, 19)),
        ("close", A1),
        ("finish", A1, "length"),
    ],
    # C begins like A: one block is shared, half of another is copied. B comes back; the prefix
    # cache still has its first block.
    [
        ("add", "c", 2, 0, 7, 1, 20),
        ("resume", B, 0, 6, 5, "swap"),
        ("share", B, 0, (2,)),
        ("alloc", B, 1, (3,)),
        ("import", B, (1,), (3,)),
        ("admit", C, 1, 7, 6),
        ("hit", C, 7, 4, 2, 4),
        ("share", C, 0, (0,)),
        ("pin", 4),
        ("alloc", C, 1, (5,)),
        ("copy", 4, 5, C, "prefix"),
        ("unpin", 4),
        ("prefill", B, 5, 1, (0,)),
        ("prefill", C, 6, 1, (0,)),
    ],
    # D is aborted before it runs, its first choice first. A step was abandoned, and C
    # computes again.
    [
        ("add", "d", 3, 0, 4, 2, 5),
        ("wait", (3, 1), D),
        ("finish", D, "abort"),
        ("finish", (3, 1), "abort"),
        ("close", C),
        ("preempt", C, None, "recompute", "last arrived", 7),
        ("evict", 1),
        ("export", B, (2, 3)),
        ("close", B),
        ("preempt", B, C, "swap", "last arrived", 0),
        ("drop", B),
        ("resume", C, 0, 8, 4, "recompute"),
        ("share", C, 0, (0,)),
        ("alloc", C, 1, (1,)),
        ("prefill", C, 4, 4, (0,)),
        ("seal", 1, 0, None, (14, 15, 24, 25)),
    ],
    [("alloc", C, 2, (5,)), ("decode", (0,)), ("force", C, 2)],
]
"""The records of consecutive steps, with blocks of four tokens.

They include every kind of record except those of `WINDOWS`, `BEAMS`, `STATES` and `REBUILD`.
"""

WINDOWS: list[Record] = [
    ("evict", 2),
    ("add", "g", 6, 0, 5, 1, 1),
    ("admit", G, 1, 5, 0),
    ("alloc", G, 0, (6, 7)),
    ("alloc_window", G, 0, (2,)),
    ("prefill", G, 0, 4, ()),
    ("seal", 6, None, None, (30, 31, 32, 33)),
    ("seal_window", 6, (2,)),
    ("pass", G, 1, (2,)),
    ("close", G),
    ("preempt", G, None, "recompute", "last arrived", 4),
    ("resume", G, 1, 5, 4, "recompute"),
    ("share", G, 0, (6,)),
    ("alloc", G, 1, (7,)),
    ("share_window", G, 0, (2,)),
    ("alloc_window", G, 1, (3,)),
    ("prefill", G, 4, 1, (0,)),
    ("close", G),
    ("finish", G, "length"),
    ("evict_window", 6, (2,)),
    ("evict", 6),
]
"""A step after the story, of a model with a group of layers that have a window."""

BEAMS: list[Record] = [
    ("add", "e", 4, 0, 2, 1, 1),
    ("admit", E, 1, 2, 0),
    ("alloc", E, 0, (6,)),
    ("prefill", E, 0, 2, (0,)),
    ("keep", E),
    ("add", "f", 5, 0, 3, 1, 1),
    ("branch", F, E, 1),
    ("alloc", F, 0, (7,)),
    ("copy", 6, 7, F, "fork"),
    ("release", F, (6,)),
    ("prefill", F, 2, 1, (0,)),
    ("close", F),
    ("finish", F, "length"),
    ("close", E),
    ("finish", E, "length"),
]
"""A step after the story. F continues E, which has ended and is kept until F has its token."""

EMPTY_STATES: dict[str, Any] = {
    **EMPTY,
    "states": {"num_slots": 3, "num_host_slots": 1, "running": {}, "saved": {}, "hosts": {}},
}
"""An engine whose model has recurrent layers."""

STATES: list[Record] = [
    ("add", "a", 0, 0, 5, 1, 9),
    ("admit", A, 0, 5, 0),
    ("alloc", A, 0, (0, 1)),
    ("state", A, 2),
    ("prefill", A, 0, 4, ()),
    ("seal", 0, None, None, (1, 2, 3, 4)),
    ("save", 0, 1),
    ("export", A, (3,)),
    ("save_host", A, 0),
    ("close", A),
    ("preempt", A, None, "swap", "last", 0),
    ("resume", A, 1, 5, 4, "swap"),
    ("share", A, 0, (0,)),
    ("alloc", A, 1, (1,)),
    ("import", A, (), ()),
    ("state", A, 0),
    ("prefill", A, 4, 1, (0,)),
    ("forget", 0),
    ("close", A),
    ("finish", A, "stop"),
    ("evict", 0),
]
"""A step after `EMPTY_STATES`. A is swapped out and in, and its snapshot is dropped."""

REBUILD: list[Record] = [("close", C), ("rebuild", {**EMPTY, **REBUILT})]
"""A last step in which a change was interrupted. No record says that C got its token."""


def summary(step: int, **numbers: float) -> dict[str, Any]:
    """Return a step's summary, with zeros for missing values.

    A step takes 5 ms, and one begins every 10 ms.
    """
    times = {
        "start": step / 100,
        "schedule_seconds": 0.001,
        "run_seconds": 0.003,
        "update_seconds": 0.001,
        "seconds": 0.005,
    }
    return {**dict.fromkeys(SUMMARY_FIELDS, 0), **times, **numbers, "step": step}


def tell(log: EventLog, story: list[list[Record]] = STORY, empty: dict[str, Any] = EMPTY) -> None:
    """Emit a story to a log that has not been started. It begins after the snapshot ``empty``."""
    log.start(lambda: empty)
    for step, records in enumerate(story, 1):
        for record in records:
            log.emit(record)
        log.end_step(summary(step, num_decode_tokens=step, num_blocks_used=4, num_blocks_saved=1))


def write_story(
    path: Path, story: list[list[Record]] = STORY, empty: dict[str, Any] = EMPTY
) -> Path:
    """Return a story as a file."""
    with path.open("w") as file:
        log = EventLog(0, file)
        tell(log, story, empty)
        log.close()
    return path


class ToyEngine:
    """One request after the other: a prompt of one token, then seven more, in blocks of two."""

    def __init__(self, emit: Callable[[Record], None]) -> None:
        self._emit = emit
        self._number = 0
        self._num_tokens = 1
        self._num_computed = 0
        self.step_number = 0

    def step(self) -> dict[str, Any]:
        """Emit the records of a step, and return its summary."""
        seq = (self._number, 0)
        if not self._num_computed:
            self._emit(("add", f"r{self._number}", self._number, 5, 1, 1, 7))
            self._emit(("admit", seq, 0, 1, 0))
        if self._num_computed % 2 == 0:
            block = self._num_computed // 2
            self._emit(("alloc", seq, block, (block,)))
        self._emit(("decode", (0,)) if self._num_computed else ("prefill", seq, 0, 1, (0,)))
        self._num_computed += 1
        self._num_tokens += 1
        if self._num_tokens == 8:
            self._emit(("close", seq))
            self._emit(("finish", seq, "length"))
            self._number, self._num_tokens, self._num_computed = self._number + 1, 1, 0
        self.step_number += 1
        return summary(self.step_number)

    def snapshot(self) -> dict[str, Any]:
        """Return the toy's state."""
        blocks = list(range(-(-self._num_computed // 2)))
        seq = (self._number, 0)
        values = {
            "request_id": f"r{self._number}",
            "rank": 5,
            "n": 1,
            "num_prompt": 1,
            "max_tokens": 7,
            "num_tokens": self._num_tokens,
            "num_computed": self._num_computed,
            "row": 0,
            "blocks": blocks,
            "host": None,
        }
        return {
            **EMPTY,
            "block_size": 2,
            "running": [seq] if blocks else [],
            "sequences": {seq: values} if blocks else {},
            "refs": dict.fromkeys(blocks, 1),
        }


def run_toy(log: EventLog, num_steps: int) -> list[dict[str, Any]]:
    """Log ``num_steps`` steps of a toy, and return the snapshots after each, from step 0 on."""
    toy = ToyEngine(log.emit)
    log.start(toy.snapshot)
    snapshots = [toy.snapshot()]
    for _ in range(num_steps):
        log.end_step(toy.step())
        snapshots.append(toy.snapshot())
    return snapshots
