"""Follow an event log in a process of its own, which takes no time from the engine's.

    python -I -S -c "import sys; sys.path.append(…); from mie.page.follow import main; main()"

A request on standard input has the name of a method of `Desk` and its arguments. The answer on
standard output has True and what the method returned, or False and the message of its `TraceError`.
The process ends with its standard input, so it never outlives its parent.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from mie.errors import TraceError
from mie.events import Segment, Snapshot, Step
from mie.page.cells import encode
from mie.page.follower import Follower, Place

NICENESS = 5
"""Where CPUs are short, the engine goes first. The page is then late, and skips nothing."""

Line = tuple[str, bytes]
"""A page record: its kind, and its JSON."""


class Desk:
    """What a parent may ask. Call `begin` first."""

    def __init__(self) -> None:
        self._follower: Follower
        self._counts: Mapping[str, int] = {}

    def begin(self, after: int, snapshot: Snapshot, steps: Sequence[Step], name: str) -> bytes:
        """Begin with the last segment of a log, and return the head of a stream.

        Raises:
            TraceError: the pool is too large for a page.
        """
        segment = Segment(after=after, snapshot=snapshot, steps=steps)
        # A thread of the engine that waits for this CPU gets it after one step, not after all.
        self._follower = Follower([segment], name, pause=os.sched_yield)
        return encode(self._follower.head).encode()

    def follow(
        self, steps: Sequence[Step], rest: Step, counts: Mapping[str, int]
    ) -> tuple[int, list[Line]]:
        """Take in what is new. Return the number of the last step, and the records for a page.

        ``counts`` are the engine's at this moment, which `key` tells.
        """
        self._counts = counts
        lines = [(kind, line.encode()) for kind, line in self._follower.records(steps, rest)]
        return self._follower.step, lines

    def key(self) -> bytes:
        """Return the record of the whole state, as it is now."""
        return encode(self._follower.key(self._counts)).encode()

    def tokens(
        self, blocks: Sequence[int]
    ) -> tuple[int, dict[int, Sequence[int]], dict[int, Place]]:
        """Return the number of the last step, and what `Follower.tokens` does."""
        return self._follower.step, *self._follower.tokens(blocks)


def send(file: IO[bytes], message: tuple[Any, ...]) -> None:
    """Write a message of plain values to the other process.

    `marshal` takes a microsecond for a step, and it never runs code of what it reads.
    """
    content = marshal.dumps(message)
    file.write(len(content).to_bytes(8, "little") + content)  # one write wakes the reader once
    file.flush()


def receive(file: IO[bytes]) -> tuple[Any, ...]:
    """Return the next message.

    Raises:
        EOFError: the other process has ended.
    """
    head = file.read(8)
    size = int.from_bytes(head, "little")
    content = file.read(size)
    if len(head) < 8 or len(content) < size:
        raise EOFError("the other process has ended")
    return marshal.loads(content)  # type: ignore[no-any-return]  # `send` takes tuples


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    desk = Desk()
    while True:
        try:
            method, *arguments = receive(requests)
        except EOFError:
            return
        try:
            answer = (True, getattr(desk, method)(*arguments))
        except TraceError as error:
            answer = (False, str(error))
        send(answers, answer)


def main() -> None:
    """Serve the parent process."""
    os.nice(NICENESS)
    serve(sys.stdin.buffer, sys.stdout.buffer)
