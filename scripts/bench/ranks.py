"""Measure one model in several processes beside one process with as many threads.

    python scripts/benchmark.py ranks MODEL [--ranks 2] [--rounds 5] [--seqs 1 8] [--tokens 64]

All sides are loaded at once, and take turns. The CPU seconds are of all processes of a side.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import Spread, in_turn, machine, parser_of, table, write_report
from mie import LLM, SamplingParams

PROMPT_TOKENS = 256


def children() -> set[int]:
    """Return the children of this process."""
    path = Path(f"/proc/{os.getpid()}/task")
    found = [(each / "children").read_text().split() for each in path.iterdir()]
    return {int(pid) for pids in found for pid in pids}


def cpu_seconds(pids: set[int]) -> float:
    """Return the CPU seconds of this process and of others."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


class Side:
    """A model with some ranks and threads."""

    def __init__(self, model: str, ranks: int, threads: int) -> None:
        before = children()
        self.llm = LLM(
            model,
            backend="jit",
            max_model_len=1024,
            tensor_parallel_size=ranks,
            num_threads=threads,
            enable_prefix_caching=False,
        )
        self.pids = children() - before

    def seconds_of(self, num_seqs: int, num_tokens: int) -> tuple[float, float, list[list[int]]]:
        """Return the seconds and the CPU seconds of answers, and their tokens."""
        prompts: Any = [
            {"prompt_token_ids": [5 + (seq + i) % 200 for i in range(PROMPT_TOKENS)]}
            for seq in range(num_seqs)
        ]
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        start, cpu = time.perf_counter(), cpu_seconds(self.pids)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds, used = time.perf_counter() - start, cpu_seconds(self.pids) - cpu
        return seconds, used, [list(output.outputs[0].token_ids) for output in outputs]


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = parser_of("ranks", __doc__)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", help="write PREFIX.json and PREFIX.md too")
    args = parser.parse_args(argv)
    many = args.ranks
    sides = {
        "1 process, 1 thread": Side(args.model, 1, 1),
        f"1 process, {many} threads": Side(args.model, 1, many),
        f"{many} processes, 1 thread each": Side(args.model, many, 1),
    }
    kinds = {f"{PROMPT_TOKENS} tokens of a prompt": (1, 1)}
    kinds |= {f"{args.tokens} tokens of {n} sequences": (n, args.tokens) for n in args.seqs}
    found: dict[str, Any] = {}
    differences = 0
    for kind, (num_seqs, num_tokens) in kinds.items():
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for number in range(args.rounds + 1):
            tokens = []
            for name in in_turn(sides, number):
                *times, answer = sides[name].seconds_of(num_seqs, num_tokens)
                tokens.append(answer)
                if number:  # the first steps are slower
                    runs[name].append((times[0], times[1]))
            differences += any(answer != tokens[0] for answer in tokens)
        found[kind] = runs
    rows = [
        [kind, name, *(str(Spread.of(run[at] for run in own)) for at in (0, 1))]
        for kind, runs in found.items()
        for name, own in runs.items()
    ]
    lines = table(["work", "side", "seconds", "CPU seconds"], rows)
    lines += ["", f"load of the machine: {os.getloadavg()[0]:.1f}; {differences} different answers"]
    write_report(args.output, {"machine": machine(), "runs": found}, lines)
    return int(differences > 0)
