"""Limit the cost of a description of an output, and explain a refusal."""

import re
import signal
from collections.abc import Mapping
from typing import Any

from mie.errors import printable, shown

LIBRARY_LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
}
"""Limits of llguidance's own. The first two are its defaults, and the third is a fifth of it.

The limits of CPU time and memory bound the cost of a description. These limits bound the cost of
one step. It grows with the vocabulary. The first mask of a text with a pattern and a length,
such as an address of up to 320 characters, needs 30,000 to 100,000 units of ``step_lexer_fuel``
with 49,152 tokens. A mask that needs 200,000 takes 20 to 50 ms. With 250,000 states, an output of
``[a-z ]*[aeiou][a-z ]{30}`` takes 90 MB.
"""

NUM_TRIED = 32
"""Masks that the worker computes to find costly descriptions."""

CPU_SECONDS = 1.0
"""CPU time in which a worker compiles a description. Most take 1 to 10 ms."""

PLACE_SECONDS = 0.2
"""CPU time in which a worker searches the place of an error in a schema."""

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

MAX_REASON = 400
"""Maximum number of characters of the library's reason in a message. Some list all tokens."""

MAX_DEPTH = 124
"""Levels of objects and lists that a schema may nest. llguidance's JSON parser has 128."""

_MEMORY = f"takes more than {MEMORY_BYTES >> 20} MiB of memory to compile (write a simpler one)"
EXCEEDED = {
    -signal.SIGPROF: f"takes more than {CPU_SECONDS:g} s of CPU time to compile (write a simpler "
    "one)",
    -signal.SIGABRT: _MEMORY,
    OUT_OF_MEMORY: _MEMORY,
    -signal.SIGSEGV: "has too long a chain of rules or references, which exceeds the stack (write "
    "a shorter one)",
}
"""The limit that a grammar exceeded, by the exit status of its compiling process."""
_PLAIN = {
    "NoExtension": "no finite text matches it (does it contradict itself, or refer to itself "
    "without end?)",
    "Unsatisfiable schema: anyOf is empty": "Unsatisfiable schema: no value is left",
    "oneOf constraints are not supported": "the alternatives of a oneOf cannot be told apart "
    "(write anyOf, or require a property in each that has another const)",
    "Value for 'multipleOf' has too many digits": "a multipleOf has too many digits",
    "recursion limit exceeded": f"it nests more than {MAX_DEPTH} levels deep, which is the limit",
}


def why(error: str) -> str:
    """Return the reason that is behind an error of llguidance, without the dump of its state."""
    for beginning, plain in _PLAIN.items():
        if error.startswith(beginning):
            return plain
    reason = error.partition("<state>")[0].partition("\n  while processing")[0]
    return printable(_placed(reason))[:MAX_REASON]


_IN_REGEX = re.compile(
    r"(?:at (?P<line>\d+)\((?P<column>\d+)\): )?(?:invalid regex .* \(in regex\): )?"
    r"regex parse error:\n"
    r" {4}(?P<pattern>[^\n]*)\n {4}(?P<before> *)\^+\nerror: (?P<reason>[^\n]*)",
    re.DOTALL,
)
_IN_LARK = re.compile(r"(?:at )?(\d+)\((\d+)\): ")


def _placed(reason: str) -> str:
    """Return a reason of the library on one line, with its place in plain words."""
    found = _IN_REGEX.match(reason)
    if found is not None:
        column = len(found["before"]) + 1
        at = f"line {found['line']}, column {found['column']}: " if found["line"] else ""
        pattern = shown(found["pattern"])
        return f"{at}invalid regex at column {column} of {pattern}: {found['reason']}"
    listing = reason.find("\n   1 | ")
    reason = reason if listing < 0 else reason[:listing]
    return " ".join(_IN_LARK.sub(r"line \1, column \2: ", reason, count=1).split())
