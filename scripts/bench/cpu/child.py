"""One engine of bench_cpu.py, in a process of its own.

    python -m bench.cpu.child SPEC          in scripts/

SPEC is a JSON object: `EngineSpec`. With "prepare" the model is brought into the engine's own
format and the process ends; otherwise it is loaded, and each line of stdin (a request) is answered
with a line of stdout. The first line is "ready". A line may also be "failed", with a reason; it is
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
    """The most memory that this process has held (its resident set), shared pages included."""
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """What the engine generates, as JSON data; ``one_by_one``: each prompt on its own."""
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
    """Load, and answer until stdin ends."""
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
    """Libraries print what they like: to stderr. Answers have stdout to themselves."""
    # A child that is stopped would outlive a parent that was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=stdout, flush=True)

    try:
        serve(EngineSpec(**json.loads(sys.argv[1])), say)
    except Exception as error:  # whatever a peer raises is its reason to be skipped
        say({"failed": f"{type(error).__name__}: {error}".splitlines()[0]})


if __name__ == "__main__":
    main()
