"""Measure the prefix cache on a disk, or fill it with conversations.

    python scripts/benchmark.py disk restart MODEL [--tokens 4000] [--rounds 3]
    python scripts/benchmark.py disk beside MODEL [--tokens 1000] [--rounds 9]
    python scripts/benchmark.py disk load MODEL --questions FILE --folder DIR

`restart` measures the first token of a long prompt in fresh processes, without a cache and with the
blocks on a disk. The seconds begin with the request. `beside` measures prompts and answers in turns
without a cache and beside the writer. `load` answers the questions of Spec-Bench
(https://github.com/hemingkx/Spec-Bench; JSON lines, plain or .xz), each with all turns, so that
`mie cache verify DIR` has blocks to compute again.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import Spread, in_turn, machine, parser_of, run_child, table, write_report
from bench.speculate import questions_of
from mie import LLM, SamplingParams

MAX_MODEL_LEN = 8192


def prompt_of(seed: int, num_tokens: int) -> dict[str, list[int]]:
    """Return a prompt of random tokens."""
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(1000, 20_000) for _ in range(num_tokens)]}


def seconds_of(llm: LLM, prompt: Any, max_tokens: int) -> tuple[float, float, Any]:
    """Return the seconds of an answer, the CPU seconds of this process, and the answer."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    start, cpu = time.perf_counter(), time.process_time()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - start, time.process_time() - cpu, output


def child() -> None:
    """Answer one prompt in this process, as a line of JSON from stdin says."""
    request = json.load(sys.stdin)
    llm = LLM(request["model"], max_model_len=MAX_MODEL_LEN, prefix_cache_dir=request["folder"])
    seconds_of(llm, prompt_of(1, 32), 1)  # the first step of a process is slower
    seconds, cpu, output = seconds_of(llm, prompt_of(0, request["tokens"]), 1)
    token_ids = list(output.outputs[0].token_ids)
    print(json.dumps([seconds, cpu, output.num_cached_tokens, token_ids]))


def restart(args: argparse.Namespace) -> int:
    """Compare the first token after a restart with the first token without a cache."""
    found: dict[str, list[Any]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        request = {"model": args.model, "tokens": args.tokens, "folder": folder}
        run_child("bench.disk", request)
        for number in range(args.rounds):
            for name in in_turn(found, number):
                own = {**request, "folder": folder if name == "with" else None}
                found[name].append(run_child("bench.disk", own))
    rows = [
        [name, str(Spread.of(run[0] for run in runs)), str(Spread.of(run[1] for run in runs))]
        for name, runs in found.items()
    ]
    least = {name: [min(run[at] for run in runs) for at in (0, 1)] for name, runs in found.items()}
    ratios = [a / b for a, b in zip(least["without"], least["with"], strict=True)]
    tokens = {json.dumps(run[3]) for runs in found.values() for run in runs}
    lines = table(["first token", "seconds", "CPU seconds"], rows)
    lines += ["", f"{ratios[0]:.1f}× sooner, with {ratios[1]:.1f}× less CPU time"]
    same = "the same first token" if len(tokens) == 1 else f"{len(tokens)} different first tokens"
    lines += [f"{found['with'][0][2]} tokens cached; {same}"]
    write_report(args.output, {"machine": machine(), "runs": found}, lines)
    return int(len(tokens) > 1)


def beside(args: argparse.Namespace) -> int:
    """Compare prompts and answers beside the writer with the same without a cache."""
    found: dict[str, list[tuple[float, float]]] = {"without": [], "beside the writer": []}
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            name: LLM(
                args.model,
                max_model_len=MAX_MODEL_LEN,
                prefix_cache_dir=folder if name != "without" else None,
            )
            for name in found
        }
        for number in range(args.rounds + 1):
            for name in in_turn(found, number):
                seconds, cpu, _ = seconds_of(sides[name], prompt_of(number, args.tokens), 64)
                if number:  # the first steps of a process are slower
                    found[name].append((seconds, cpu))
        sides.clear()
        gc.collect()  # ends the writer
    rows, least = [], {}
    for name, runs in found.items():
        rows.append([name, *(str(Spread.of(run[at] for run in runs)) for at in (0, 1))])
        least[name] = [min(run[at] for run in runs) for at in (0, 1)]
    ratios = [a / b for a, b in zip(least["without"], least["beside the writer"], strict=True)]
    lines = table([f"{args.tokens} tokens and 64 more", "seconds", "CPU seconds"], rows)
    lines += ["", f"{ratios[0]:.3f}× as fast beside the writer; CPU time {ratios[1]:.3f}×"]
    write_report(args.output, {"machine": machine(), "runs": found}, lines)
    return 0


def load(args: argparse.Namespace) -> int:
    """Answer conversations with a folder, and print how many blocks it has."""
    llm = LLM(args.model, max_model_len=MAX_MODEL_LEN, max_num_seqs=8, prefix_cache_dir=args.folder)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0)
    chats: list[list[dict[str, str]]] = []
    for question in questions_of(Path(args.questions)):
        messages: list[dict[str, str]] = []
        for turn in question["turns"]:
            messages += [{"role": "user", "content": turn}]
            chats.append([*messages])
            messages += [{"role": "assistant", "content": "I understand. Please go on."}]
    outputs = llm.chat(chats, params, use_tqdm=sys.stderr.isatty())
    num_tokens = sum(len(each.prompt_token_ids or ()) for each in outputs)
    num_cached = sum(each.num_cached_tokens or 0 for each in outputs)
    print(f"{len(chats)} requests, {num_tokens:,} prompt tokens, {num_cached:,} cached")
    return 0


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    parser = parser_of("disk", __doc__)
    parser.add_argument("what", choices=["restart", "beside", "load"])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--questions", help="JSON lines of Spec-Bench, for load")
    parser.add_argument("--folder", help="prefix_cache_dir, for load")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of an answer, for load")
    parser.add_argument("--output", help="write PREFIX.json and PREFIX.md too")
    args = parser.parse_args(argv)
    if args.what == "load":
        return load(args)
    tokens, rounds = {"restart": (4000, 3), "beside": (1000, 9)}[args.what]
    args.tokens, args.rounds = args.tokens or tokens, args.rounds or rounds
    return restart(args) if args.what == "restart" else beside(args)


if __name__ == "__main__":
    child()
