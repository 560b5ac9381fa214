"""Say why a description cannot be followed, in its writer's words."""

from __future__ import annotations

import signal

from mie.errors import printable
from mie.structured.limits import CPU_SECONDS, MEMORY_BYTES, OUT_OF_MEMORY

MAX_REASON = 400
"""Maximum number of characters of the library's reason in a message. Some list all tokens."""

MAX_DEPTH = 124
"""Levels of objects and lists that a schema may nest. llguidance's JSON parser has 128."""

_MEMORY = f"takes more than {MEMORY_BYTES >> 20} MiB of memory to compile (write a simpler one)"
_EXCEEDED = {
    -signal.SIGPROF: f"takes more than {CPU_SECONDS:g} s of CPU time to compile (write a simpler "
    "one)",
    -signal.SIGABRT: _MEMORY,
    OUT_OF_MEMORY: _MEMORY,
    -signal.SIGSEGV: "has too long a chain of rules or references, which exceeds the stack (write "
    "a shorter one)",
}
_PLAIN = {
    "NoExtension": "no finite text matches it (does it contradict itself, or refer to itself "
    "without end?)",
    "Failed to generate regex for integer range": "the bounds of an integer leave no value "
    "in -2**63 … 2**63 - 1, where integers with bounds may be",
    "recursion limit exceeded": f"it nests more than {MAX_DEPTH} levels deep, which is the limit",
}


def exceeded(returncode: int) -> str | None:
    """Return the limit that a grammar exceeded, by the exit status of what compiled it."""
    return _EXCEEDED.get(returncode)


def why(error: str) -> str:
    """Return the reason that is behind an error of llguidance, without the dump of its state."""
    for beginning, plain in _PLAIN.items():
        if error.startswith(beginning):
            return plain
    reason = " ".join(error.partition("<state>")[0].split())
    return printable(reason)[:MAX_REASON]
