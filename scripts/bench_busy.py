"""Compare decoding with one thread and with the default number on a busy machine.

    python scripts/bench_busy.py [--model DIR] [--requests 1 8 64] [--loops 2] [--rounds 7]

An engine with one thread and an engine with the default number take turns at decoding: first beside
``--loops`` busy loops, then alone. The table has the median tokens per second of each, and the
median, the smallest and the largest ratio of neighbouring turns.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mie
from mie import EngineConfig, SamplingParams
from mie.engine.engine import Engine
from mie.load.engine import load_engine

BUNDLED = Path(mie.__file__).parent / "assets" / "tiny"
PROMPT = list(range(100, 140))
MAX_TOKENS = 400


@contextlib.contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Run ``number`` processes that use all the CPU time they get."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.send_signal(signal.SIGKILL)
            loop.wait()


class Decoding:
    """An engine that decodes without end: requests that finish are added again."""

    def __init__(self, model: Path, num_threads: int | None, num_requests: int) -> None:
        config = EngineConfig(
            num_threads=num_threads,
            max_num_seqs=num_requests,
            enable_prefix_caching=False,
        )
        self._engine: Engine = load_engine(model, config)
        self._num_requests = num_requests
        self._number = 0

    def tokens_per_second(self, seconds: float) -> float:
        """Measure decoding for ``seconds``. Steps that compute prompts do not count."""
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        num_tokens, spent = 0, 0.0
        while spent < seconds:
            if not self._engine.has_work:
                for _ in range(self._num_requests):
                    self._engine.add_request(PROMPT, params)
                self._engine.step()
            begin = time.perf_counter()
            self._engine.step()
            spent += time.perf_counter() - begin
            num_tokens += self._num_requests
        return num_tokens / spent


def compare(one: Decoding, default: Decoding, rounds: int, seconds: float) -> str:
    """Return a row of the table: tokens per second of both engines, and their ratios."""
    pairs = []
    for turn in range(rounds + 1):
        both = [one, default] if turn % 2 else [default, one]
        speeds = {id(each): each.tokens_per_second(seconds) for each in both}
        pairs.append((speeds[id(one)], speeds[id(default)]))
    pairs = pairs[1:]  # the first turn warms up
    ones, defaults = zip(*pairs, strict=True)
    ratios = [each / first for first, each in pairs]
    return (
        f"{statistics.median(ones):9.0f} {statistics.median(defaults):9.0f}"
        f" {statistics.median(ratios):7.2f} {min(ratios):7.2f} {max(ratios):7.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=BUNDLED, help="model directory")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64], help="batch sizes")
    parser.add_argument("--loops", type=int, default=os.cpu_count(), help="busy loops beside it")
    parser.add_argument("--rounds", type=int, default=7, help="turns that count")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f}, {os.cpu_count()} CPUs")
    print("loops requests  1 thread   default   ratio     min     max")
    for num_requests in options.requests:
        one = Decoding(options.model, 1, num_requests)
        default = Decoding(options.model, None, num_requests)
        for loops in (options.loops, 0):
            with busy_loops(loops):
                line = compare(one, default, options.rounds, options.seconds)
            print(f"{loops:5} {num_requests:8} {line}", flush=True)


if __name__ == "__main__":
    main()
