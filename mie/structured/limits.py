"""Limits on what a description of an output may cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIBRARY_LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 20_000,
    "max_lexer_states": 50_000,
}
"""Limits of llguidance's own, a tenth and a fifth of its defaults.

They limit a step. With the defaults, a mask of ``((a{1000}){1000}){1000}`` takes seconds, and an
output of ``[a-z ]*[aeiou][a-z ]{30}`` takes 90 MB.
"""

CPU_SECONDS = 1.0
"""CPU time in which a worker compiles a description. Most take 1 to 10 ms."""

MEMORY_BYTES = 128 << 20
"""Memory that a description may take in the worker while it is compiled."""

OUT_OF_MEMORY = 77
"""Exit status of a process that reached this limit in Python."""

STACK_BYTES = 1 << 20
"""Stack of the thread that compiles in the worker. Threads of the server have at least twice that.

llguidance follows rules and references by recursion.
"""

WALL_SECONDS = 60.0
"""Time after which a worker that does not answer is replaced."""

START_SECONDS = 300.0
"""Time in which a new worker must have indexed the vocabulary."""

MAX_KEPT = 32
MAX_KEPT_BYTES = 256 << 20
"""Descriptions that stay compiled although no request uses them, and their memory together."""

MAX_REFUSALS = 256
"""Refusals that are remembered."""

FIRST_SECONDS = 0.5
SECONDS_PER_TOKEN = 0.01
"""CPU time for the masks of one output: so much, and so much more for each of its tokens."""
