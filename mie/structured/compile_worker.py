"""Compile grammars in a separate process. `mie.structured.compiler` starts it.

The first message is the vocabulary. Every other message is a description of an output. A forked
child writes and compiles its grammar under the limits, so that a description leaves nothing behind.
A message that arrives meanwhile cancels the description; it is empty. Replies are JSON objects.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import threading
from typing import TYPE_CHECKING, Any

from mie.base import worker_side
from mie.config.params.structured import StructuredOutputsParams
from mie.errors import RequestError
from mie.structured.descriptions import grammar_of, place_of, unique_items_of
from mie.structured.limits import (
    CPU_SECONDS,
    LIBRARY_LIMITS,
    MEMORY_BYTES,
    NUM_TRIED,
    OUT_OF_MEMORY,
    STACK_BYTES,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LONGEST_REASON = 10_000  # most characters of a reason
_ENDS = ('"', "]", "}", "0", ",")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer messages until the socket closes."""
    from llguidance import LLTokenizer

    vocabulary = worker_side.read_message()
    if vocabulary is None:
        return
    tokens = LLTokenizer(**json.loads(vocabulary))
    _reply({})
    while (description := worker_side.read_message()) is not None:
        if description:  # an empty one cancels a description that has just ended
            _reply(_compiled_in_child(tokens, description.decode()))


def _reply(reply: dict[str, Any]) -> None:
    worker_side.write_message(json.dumps(reply).encode())


def _compiled_in_child(tokens: LLTokenizer, description: str) -> dict[str, Any]:
    """Return the reply of a forked child, or its exit status if it gives none."""
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _answer_and_exit(tokens, description, parent, writer)
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


def _answer_and_exit(tokens: LLTokenizer, description: str, parent: int, writer: int) -> None:
    """Compile a description under the limits in this process. It ends with its parent."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        worker_side.limit_cpu_seconds(CPU_SECONDS)
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=_answer, args=(tokens, description, writer))
        thread.start()
        thread.join()
    finally:
        os._exit(1)


def _answer(tokens: LLTokenizer, description: str, writer: int) -> None:
    status = 1
    try:
        # Not before this thread has started, because the limit on processes counts threads.
        worker_side.limit_address_space(worker_side.address_space() + MEMORY_BYTES)
        reply = json.dumps(_compiled(tokens, description)).encode()
        while reply:
            reply = reply[os.write(writer, reply) :]
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def _compiled(tokens: LLTokenizer, description: str) -> dict[str, Any]:
    """Return the grammar and its memory, why the description is refused, or the library's error."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        params = StructuredOutputsParams(**json.loads(description))
        grammar = grammar_of(params, tokens.eos_tokens)
        unique_items = unique_items_of(params)
    except RequestError as refusal:
        return {"refusal": str(refusal)[:_LONGEST_REASON]}
    except RecursionError:
        return {"refusal": "nests too deep (write a simpler one)"}
    before = worker_side.resident_bytes()
    limits = LLParserLimits(**LIBRARY_LIMITS)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        error = matcher.get_error()
        place = place_of(
            params,
            error,
            lambda part: LLMatcher(tokens, part, log_level=0, limits=limits).get_error(),
        )
        return {"error": error[:_LONGEST_REASON], "place": place}
    trial = matcher.deep_copy()  # every output makes such a copy
    _try(tokens, trial)
    if trial.is_error():
        return {"error": trial.get_error()[:_LONGEST_REASON]}
    num_bytes = worker_side.resident_bytes() - before
    return {"grammar": grammar, "num_bytes": num_bytes, "unique_items": unique_items}


def _try(tokens: LLTokenizer, matcher: LLMatcher) -> None:
    """Follow a short output.

    This finds grammars that allow nothing, and masks that cost too much.

    It ends each text as soon as possible, to come to many parts of the grammar.
    """
    ends = [token for text in _ENDS if len(token := tokens.tokenize_str(text)) == 1]
    for _ in range(NUM_TRIED):
        matcher.consume_tokens(matcher.compute_ff_tokens())
        mask = matcher.compute_bitmask()
        if matcher.is_stopped():  # a matcher also stops after an error
            return
        allowed = int.from_bytes(mask, "little")
        first = (allowed & -allowed).bit_length() - 1
        end = next((token for [token] in ends if allowed >> token & 1), first)
        if end in tokens.eos_tokens:
            return
        matcher.consume_token(end)
