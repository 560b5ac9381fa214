"""Replay a coding agent whose first line changes in each turn, with and without leaving it out.

    python scripts/agent_check.py [MODEL] [--turns 20] [OPTION OF mie serve ...]

``mie serve`` runs twice in a new process. Without ``--ignore-prompt-lines`` the header, the usage
and the page must name the token at which each turn departs. With it each turn must compute its new
tokens only. The exit code is 1 if not.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx2
from serve_checks.agent import PATTERN, bodies, faults, on_the_page, replay
from serve_checks.server import serving

BLOCK_SIZE = 16
NUM_WORDS, NUM_RESULT_WORDS = 1200, 60
"""Words of the system prompt, and of the result of a tool."""
PATIENCE = 600.0
"""Seconds for an answer."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run both servers, print a line for each turn, and return 1 if there is a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--turns", type=int, default=20)
    args, options = parser.parse_known_args(argv)
    is_small = args.model == "bundled"
    words = (60, 8) if is_small else (NUM_WORDS, NUM_RESULT_WORDS)
    requests = bodies(args.turns, *words)
    all_faults = []
    with tempfile.TemporaryDirectory() as folder:
        for is_ignored in (False, True):
            own = ["--block-size", str(BLOCK_SIZE), *options]
            own += ["--ignore-prompt-lines", PATTERN] if is_ignored else []
            log = Path(folder) / "log"
            with (
                serving(log, [args.model, *own], key="") as server,
                httpx2.Client(base_url=server.url, timeout=PATIENCE) as client,
            ):
                turns, shown = replay(client, requests), on_the_page(client)
            print(f"\n{'with' if is_ignored else 'without'} --ignore-prompt-lines")
            for number, turn in enumerate(turns, start=1):
                print(
                    f"turn {number:2}: {turn.num_prompt:6,} tokens, {turn.num_computed:6,} computed"
                    f"  {turn.header or ''}"
                )
            all_faults += faults(
                requests, turns, shown, is_ignored=is_ignored, block_size=BLOCK_SIZE
            )
    for fault in all_faults:
        print(f"fault: {fault}")
    return bool(all_faults)


if __name__ == "__main__":
    sys.exit(main())
