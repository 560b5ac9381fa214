"""Measure two checkouts side by side: tokens per second, `import mie` and the first token.

    git worktree add --detach ../before COMMIT
    python scripts/bench_versions.py ../before . [--rounds 5]

Each figure comes from a fresh process, and rounds alternate between the checkouts. Ratios are taken
within a round. Variables that tune OpenBLAS are removed. Both read the same model files: the
bundled model, and SmolLM2-135M's shape with random weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench_start import environment, seconds_to_first_token, seconds_to_run

from mie.sim.book.random_model import write_random_model

GENERATE = """
import sys, time
from mie import LLM, SamplingParams
model, num_requests, num_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llm = LLM(**({} if model == "bundled" else {"model": model}), max_num_seqs=64, max_model_len=512,
          skip_tokenizer_init=model != "bundled")
prompts = [[(7 * i + j) % 900 + 10 for j in range(16)] for i in range(num_requests)]
prompts = [{"prompt_token_ids": each} for each in prompts]
params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True,
                        detokenize=model == "bundled")
seconds = []
for _ in range(3):
    llm.reset_prefix_cache()
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds.append(time.perf_counter() - began)
print(num_requests * num_tokens / min(seconds[1:]))
"""


def tokens_per_second(root: Path, model: str, num_requests: int, num_tokens: int) -> float:
    """Generate in a process of that checkout, and return the better of two warm runs."""
    command = [sys.executable, "-c", GENERATE, model, str(num_requests), str(num_tokens)]
    done = subprocess.run(
        command, check=True, env=environment(root), cwd=root, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all figures in turns and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1; got {args.rounds}")
    roots = [args.before.resolve(), args.after.resolve()]
    for root in roots:
        if not (root / "mie").is_dir():
            parser.error(f"{root} is not a checkout: it has no folder mie")
    with tempfile.TemporaryDirectory() as folder:
        smol = Path(folder) / "SmolLM2-135M"
        smol.mkdir()
        write_random_model("SmolLM2-135M", smol)
        figures = {
            "bundled, 1 request, tokens/s": ("bundled", 1, 200),
            "bundled, 64 requests, tokens/s": ("bundled", 64, 64),
            "SmolLM2-135M, 1 request, tokens/s": (str(smol), 1, 32),
            "SmolLM2-135M, 64 requests, tokens/s": (str(smol), 64, 16),
        }
        print(f"load average {os.getloadavg()[0]:.1f}, {args.rounds} rounds, medians (least-most)")
        for name, load in figures.items():
            rows = []
            for number in range(args.rounds):
                order = roots if number % 2 == 0 else roots[::-1]
                found = {root: tokens_per_second(root, *load) for root in order}
                rows.append([found[root] for root in roots])
            show(name, rows)
        for name, measure in (
            ("import mie, s", partial(seconds_to_run, "import mie")),
            ("first token, s", seconds_to_first_token),
        ):
            show(name, [[measure(root) for root in roots] for _ in range(args.rounds)])


def show(name: str, rows: Sequence[Sequence[float]]) -> None:
    """Print medians of both checkouts and the ratio."""
    before, after = zip(*rows, strict=True)
    ratios = sorted(b / a for a, b in rows)
    print(
        f"{name}: {statistics.median(before):.4g}, {statistics.median(after):.4g}, "
        f"after / before {statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
