"""Provide hand-made event logs for tests without an engine."""

import json
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

_STORIES = json.loads(
    (Path(__file__).parent / "data/event_stories.json").read_text(encoding="utf-8")
)


def _records(rows: list[Any]) -> list[Record]:
    """Return the records of a step, whose lists are tuples."""

    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return [tuples(row) for row in rows]


STORY: list[list[Record]] = [_records(step["records"]) for step in _STORIES["story"]]
"""The records of consecutive steps, with blocks of four tokens. A is request 0, B request 1, …

They include every kind of record except those of `WINDOWS`, `STATES` and `REBUILD`.
"""

WINDOWS = _records(_STORIES["windows"])
"""A step after the story, of a model with a group of layers that have a window."""

EMPTY_STATES: dict[str, Any] = {
    **EMPTY,
    "states": {"num_slots": 3, "num_host_slots": 1, "running": {}, "saved": {}, "hosts": {}},
}
"""An engine whose model has recurrent layers."""

STATES = _records(_STORIES["states"])
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
