"""Run one engine of bench_cpu.py in its own process.

    python -m bench.cpu.child SPEC          in scripts/

SPEC is an `EngineSpec` as a JSON object. With "prepare", the child converts the model to the
engine's own format and exits. Otherwise it loads the model and answers each line of stdin, which is
a request, with a line on stdout. The first line is "ready". A line "failed" gives a reason and is
the last one.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.cpu.engines import ENGINES, Engine, EngineSpec, Generated

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def peak_bytes() -> int:
    """Return the peak resident set of this process in bytes, shared pages included."""
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Return what the engine generates for a request, as JSON data.

    With ``one_by_one`` each prompt runs alone.
    """
    prompts, num_new_tokens = request["prompts"], request["num_new_tokens"]
    result = Generated(tokens=[], times=[])
    before = 0.0
    for group in [[each] for each in prompts] if request["one_by_one"] else [prompts]:
        start = time.perf_counter()
        part = engine.generate(group, num_new_tokens)
        result.tokens += part.tokens
        result.times += [[before + when for when in each] for each in part.times]
        result.steps += part.steps
        before += time.perf_counter() - start
    wanted = [num_new_tokens] * len(prompts)
    got = [len(each) for each in result.times]
    if got != wanted or [len(each) for each in result.tokens] != wanted:
        raise RuntimeError(f"asked for {num_new_tokens} new tokens a prompt; times of {set(got)}")
    return vars(result) | {"seconds": before, "peak_bytes": peak_bytes()}


def serve(spec: EngineSpec, say: Callable[[dict[str, Any]], None]) -> None:
    """Load the engine, then answer requests until stdin ends."""
    engine_class = ENGINES[spec.family]
    if spec.prepare:
        engine_class.prepare(spec)
        say({"ready": spec.converted})
        return
    start = time.perf_counter()
    engine = engine_class(spec)
    seconds = time.perf_counter() - start
    say({"ready": engine.version, "load_seconds": seconds, "peak_bytes": peak_bytes()})
    for line in sys.stdin:
        say(answer(engine, json.loads(line)))


def main() -> None:
    """Answer on the original stdout, and send what libraries print to stderr."""
    # A child that is stopped would outlive a parent that was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=stdout, flush=True)

    try:
        serve(EngineSpec(**json.loads(sys.argv[1])), say)
    except Exception as error:  # any error of a peer is the reason to skip it
        say({"failed": f"{type(error).__name__}: {error}".splitlines()[0]})


if __name__ == "__main__":
    main()
