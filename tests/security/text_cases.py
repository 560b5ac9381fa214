"""Runs cases of hostile text in children of one warm process: what became of each, and its cost.

    python text_cases.py < cases.json        [[action, argument], …]

prints a JSON object for each. CPU seconds are counted, not time, so that a busy machine does not
change the verdict.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_CPU_SECONDS = 1.0
MAX_BYTES = 200_000_000

HELLO = [{"role": "user", "content": "hello"}]


def measured(cases: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """For each (action, argument): outcome, is_ours, cpu_seconds and peak_bytes."""
    process = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    return [json.loads(line) for line in process.stdout.splitlines()]


def check_refused(result: dict[str, Any], *named: str) -> None:
    """Fail unless the case was refused by an error of ours that names all of ``named``, cheaply."""
    outcome = result["outcome"]
    assert result["is_ours"], f"not refused: {outcome}"
    for name in named:
        assert name in outcome, outcome
    assert outcome.isprintable(), outcome
    assert len(outcome) < 2000
    check_cost(result)


def check_cost(result: dict[str, Any]) -> None:
    """Fail if the case took more than an untrusted input may."""
    assert result["cpu_seconds"] < MAX_CPU_SECONDS, result
    assert result["peak_bytes"] < MAX_BYTES, result


def render(template: str) -> str:
    """What a template writes, at most 80 characters of it."""
    from mie.text.chat import ChatTemplate

    return ChatTemplate(template).render(HELLO)[:80]


def content_format(template: str) -> str:
    """What a template takes as content."""
    from mie.text.chat import ChatTemplate

    return ChatTemplate(template).content_format


def load_tokenizer(directory: str) -> str:
    """Nothing, if the tokenizer of ``directory`` loads."""
    from mie.text.tokenizer import Tokenizer

    Tokenizer.load(Path(directory), None)
    return ""


def encode(arguments: Sequence[str]) -> str:
    """The number of tokens of a text."""
    from mie.text.tokenizer import Tokenizer

    directory, text = arguments
    return str(len(Tokenizer.load(Path(directory), None).encode(text)))


ACTIONS = (render, content_format, load_tokenizer, encode)


def _usage(who: int) -> tuple[float, int]:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def _run(action: str, argument: Any) -> dict[str, Any]:
    import gc

    from mie.errors import MieError

    seconds, idle = _usage(resource.RUSAGE_SELF)
    is_ours = False
    try:
        outcome = {function.__name__: function for function in ACTIONS}[action](argument)
    except MieError as error:
        outcome, is_ours = str(error), True
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"[:300]
    gc.collect()  # which ends the worker, so that its cost is counted
    own_seconds, own_peak = _usage(resource.RUSAGE_SELF)
    worker_seconds, worker_peak = _usage(resource.RUSAGE_CHILDREN)
    return {
        "outcome": outcome,
        "is_ours": is_ours,
        "cpu_seconds": own_seconds - seconds + worker_seconds,
        "peak_bytes": own_peak - idle + worker_peak,
    }


def _main() -> None:
    import mie.text.chat
    import mie.text.renderer
    import mie.text.tokenizer  # noqa: F401  # what follows is to cost the cases nothing

    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    for action, argument in json.load(sys.stdin):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print(json.dumps(_run(action, argument)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            killed = {"outcome": f"status {status}", "is_ours": False}
            print(json.dumps({**killed, "cpu_seconds": 99.0, "peak_bytes": 0}), flush=True)


if __name__ == "__main__":
    _main()
