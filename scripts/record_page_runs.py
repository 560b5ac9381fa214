"""Record the three runs that come with the web page, with the real engine and the bundled model.

    python scripts/record_page_runs.py [DIRECTORY]

The files are the page's records, compressed: mie/page/runs/*.page.jsonl.gz, or in
DIRECTORY. Seeds are fixed, so a run differs from the last one in its times only.
"""

import gzip
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mie import LLM, SamplingParams
from mie.events import read_log
from mie.page.assets import RUNS
from mie.page.cells import NodeText
from mie.page.recording import Recording

SYSTEM = (
    "You are a storyteller. You tell short stories about animals who live by a river. Every story "
    "has a beginning, a small trouble and a happy end. "
)
TOPICS = (
    ("an otter and a mill", 2),
    ("a frog named Rosa", 6),
    ("a heron and a hat", 7),
    ("a mouse and a ring", 3),
    ("an otter and a mill", 3),
    ("a duck and a boat", 1),
    ("a wolf and a bell", 0),
    ("a snail and a lamp", 6),
    ("a fox and a lantern", 2),
    ("a beaver and a key", 3),
    ("a fish and a shell", 3),
    ("an otter and a mill", 5),
)
BEGINNINGS = (
    ("a frog named Rosa", 6),
    ("a heron named Ada who", 7),
    ("a mouse named Felix who lived", 2),
    ("an otter named Bella who", 5),
    ("a duck named Ivy who lived", 1),
    ("a wolf named Hugo who", 2),
)
"""Parts of the prompts, and seeds with which the answers are stories that do not end too soon.

The chapters of the page's story give the number of tokens of some prompts.
"""
REPETITIONS = (
    "Once upon a time there was a fox named Ruby who lived in the forest. Ruby had a long red "
    "tail. Once upon a time there was a fox named Ruby who",
    "The fox said: good night, moon. The owl said: good night, moon. The bear said:",
    "One day, Mia the otter found a bell. The bell rang. Mia the otter",
)
TEMPERATURE = 0.7
BLOCK_BYTES = 32 << 10
"""Bytes of a block of 8 tokens of the bundled model."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request and the step before which it arrives."""

    step: int
    name: str
    prompt: str
    params: SamplingParams
    leaves_at: int | None = None
    """The step before which its client leaves."""


def shared_prompt() -> tuple[dict[str, Any], list[Arrival]]:
    """Twelve requests with one system prompt: prefix hits, a fork, chunked prefill, a client that
    leaves."""
    settings = {"block_size": 8, "num_blocks": 56, "max_num_seqs": 6, "max_num_batched_tokens": 40}
    arrivals = [
        Arrival(
            step=step,
            name=f"story-{index + 1}",
            prompt=f"{SYSTEM}Tell a story about {topic}.",
            params=SamplingParams(
                max_tokens=24 + 8 * (index % 4),
                n=3 if index == 3 else 1,
                seed=seed,
                temperature=TEMPERATURE,
                ignore_eos=True,
            ),
            leaves_at=45 if index == 7 else None,
        )
        for index, (step, (topic, seed)) in enumerate(
            zip((0, 6, 7, 12, 14, 16, 24, 30, 38, 46, 50, 64), TOPICS, strict=True)
        )
    ]
    return settings, arrivals


def small_pool() -> tuple[dict[str, Any], list[Arrival]]:
    """Requests that need more blocks than there are: preemption by swap and by recomputation."""
    settings = {
        "block_size": 8,
        "num_blocks": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "preemption_mode": "swap",
        "swap_space": 6 * BLOCK_BYTES,
    }
    arrivals = [
        Arrival(
            step=3 * index,
            name=f"tale-{index + 1}",
            prompt=f"Once upon a time there was {beginning}",
            params=SamplingParams(
                max_tokens=56, seed=seed, temperature=TEMPERATURE, ignore_eos=True
            ),
        )
        for index, (beginning, seed) in enumerate(BEGINNINGS)
    ]
    return settings, arrivals


def guesses() -> tuple[dict[str, Any], list[Arrival]]:
    """Prompts that repeat their own words, so that some drafts are right."""
    settings = {
        "block_size": 8,
        "num_blocks": 32,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 40,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False},
    }
    arrivals = [
        Arrival(
            step=4 * index,
            name=f"guess-{index + 1}",
            prompt=prompt,
            params=SamplingParams(
                max_tokens=48, seed=index, temperature=TEMPERATURE, ignore_eos=True
            ),
        )
        for index, prompt in enumerate(REPETITIONS)
    ]
    return settings, arrivals


SCENES = {"shared-prompt": shared_prompt, "small-pool": small_pool, "guesses": guesses}


def record(settings: dict[str, Any], arrivals: Sequence[Arrival], trace: Path) -> LLM:
    """Run the requests and write the event log."""
    with trace.open("w") as file:
        llm = LLM("bundled", trace=file, **settings)
        waiting, step = list(arrivals), 0
        while waiting or llm.engine.has_work:
            for each in [each for each in waiting if each.step <= step]:
                waiting.remove(each)
                ids = llm.get_tokenizer().encode(each.prompt)
                llm.engine.add_request(ids, each.params, each.name)
            for each in arrivals:
                if each.leaves_at == step:
                    llm.engine.abort(each.name)
            if llm.engine.has_work:
                llm.engine.step()
            step += 1
        llm.engine.log.close()
    return llm


def main() -> None:
    """Record all runs."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    directory.mkdir(parents=True, exist_ok=True)
    for name, scene in SCENES.items():
        with tempfile.TemporaryDirectory() as temporary:
            trace = Path(temporary) / f"{name}.jsonl"
            llm = record(*scene(), trace)
            tokenizer = llm.get_tokenizer()
            recording = Recording(read_log(trace), NodeText(tokenizer.decode))
            lines = "".join(line + "\n" for line in recording.lines(f"{name}.jsonl"))
        path = directory / f"{name}.page.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode(), compresslevel=9, mtime=0))
        print(
            f"{path}: {recording.last} steps, {llm.engine.stats.num_preemptions} preemptions, "
            f"{len(lines):,} bytes, {path.stat().st_size:,} compressed"
        )


if __name__ == "__main__":
    main()
