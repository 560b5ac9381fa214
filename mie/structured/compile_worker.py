"""Compile grammars in a separate process, which `mie.structured.compiler` starts.

The first message is the vocabulary. Every other message is a grammar for llguidance, which a forked
child compiles under the limits, so that a grammar leaves nothing behind. A message that arrives
meanwhile cancels the grammar; it is empty. Replies are JSON objects.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import threading
from typing import TYPE_CHECKING, Any

from mie.structured.limits import (
    CPU_SECONDS,
    LIBRARY_LIMITS,
    MEMORY_BYTES,
    OUT_OF_MEMORY,
    STACK_BYTES,
)
from mie.system import worker_side

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_LONGEST_REASON = 10_000  # characters
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer messages until the socket closes."""
    from llguidance import LLTokenizer

    vocabulary = worker_side.read_message()
    if vocabulary is None:
        return
    tokens = LLTokenizer(**json.loads(vocabulary))
    _reply({})
    while (grammar := worker_side.read_message()) is not None:
        if grammar:  # an empty one cancels a grammar that has just ended
            _reply(_compiled_in_child(tokens, grammar.decode()))


def _reply(reply: dict[str, Any]) -> None:
    worker_side.write_message(json.dumps(reply).encode())


def _compiled_in_child(tokens: LLTokenizer, grammar: str) -> dict[str, Any]:
    """Return the reply of a forked child, or its exit status if it gives none."""
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _answer_and_exit(tokens, grammar, parent, writer)
    os.close(writer)
    text = b""
    while True:
        readable, _, _ = select.select([reader, worker_side.SOCKET], [], [])
        if worker_side.SOCKET in readable:  # cancelled, or the server is gone
            os.kill(child, signal.SIGKILL)
            break
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        text += piece
    os.close(reader)
    _, status = os.waitpid(child, 0)
    returncode = os.waitstatus_to_exitcode(status)
    reply: dict[str, Any] = {"returncode": returncode} if returncode else json.loads(text)
    return reply


def _answer_and_exit(tokens: LLTokenizer, grammar: str, parent: int, writer: int) -> None:
    """Compile a grammar under the limits in this process, which ends with its parent."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        worker_side.limit_cpu_seconds(CPU_SECONDS)
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=_answer, args=(tokens, grammar, writer))
        thread.start()
        thread.join()
    finally:
        os._exit(1)


def _answer(tokens: LLTokenizer, grammar: str, writer: int) -> None:
    status = 1
    try:
        # Not before this thread has started, which is one of the processes that are forbidden.
        worker_side.limit_address_space(worker_side.address_space() + MEMORY_BYTES)
        reply = json.dumps(_compiled(tokens, grammar)).encode()
        while reply:
            reply = reply[os.write(writer, reply) :]
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def _compiled(tokens: LLTokenizer, grammar: str) -> dict[str, Any]:
    """Return the memory of the compiled grammar, or the library's error."""
    from llguidance import LLMatcher, LLParserLimits

    before = worker_side.resident_bytes()
    limits = LLParserLimits(**LIBRARY_LIMITS)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()  # finds grammars that compile and allow nothing
    if matcher.is_error():
        return {"error": matcher.get_error()[:_LONGEST_REASON]}
    matcher.deep_copy()  # which every output does
    return {"num_bytes": worker_side.resident_bytes() - before}
