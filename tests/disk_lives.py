"""Let engines live on one folder of blocks, one after another and at the same time.

As a program, this module is one life in a process. It writes a line for each answer:

    python tests/disk_lives.py '{"model": ..., "folder": ..., "asks": [[ids, salt], ...], ...}'
"""

import json
import random
import resource
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from audit import check_scheduler, tier_of
from faulty_disk import FaultyDisk

from mie import SamplingParams
from mie.config.engine import EngineConfig
from mie.disk import store
from mie.engine.engine import Engine
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

GOLDEN = Path(__file__).parent / "golden" / "models"
MODELS = ("qwen3_tied", "gemma3_two_ropes", "qwen3_layer_types", "qwen35_delta", "granite4_mamba")
MAX_STEPS = 5000
"""Steps after which a life counts as hung."""

Ask = tuple[list[int], SamplingParams, str | None]
Answer = list[tuple[list[int], str | None, list[Any]]]


def new_engine(model: str, backend: str, **settings: Any) -> Engine:
    dtype = "float64" if backend == "numpy" else "float32"
    return load_engine(
        GOLDEN / model,
        LoadSettings(engine=EngineConfig(**settings), backend=backend, dtype=dtype),
        use_tqdm=False,
    )


def small_segments() -> Any:
    """Write segments of few blocks, soon after the blocks were computed."""
    return patch.multiple(store, SEGMENT_BYTES=2000, WAIT_SECONDS=0.001, TICK_NS=20_000_000)


class Life:
    """An engine and its requests."""

    def __init__(
        self, engine: Engine, asks: list[Ask], aborted: Mapping[int, int] | None = None
    ) -> None:
        """``aborted`` has the requests that are aborted before a step. They have no answer."""
        self.engine = engine
        self.requests = [
            engine.add_request(ids, params, cache_salt=salt) for ids, params, salt in asks
        ]
        self._aborted = aborted or {}
        self._steps = count()

    def step(self) -> bool:
        """Compute a step. Return whether any request is unfinished."""
        number = next(self._steps)
        assert number < MAX_STEPS, "the engine hangs"
        if number in self._aborted:
            self.engine.abort(self.requests[self._aborted[number]].request_id)
        if self.engine.has_work:
            self.engine.step()
            check_scheduler(self.engine.scheduler)
        return self.engine.has_work

    @property
    def answers(self) -> dict[int, Answer]:
        """The complete answers: tokens, and log-probabilities if products are exact."""
        is_exact = self.engine.backend == "jit"
        return {
            number: [
                (seq.output_ids, seq.finish_reason, [r.logprobs for r in seq.logprobs] * is_exact)
                for seq in request.sequences
            ]
            for number, request in enumerate(self.requests)
            if request.is_finished and number not in self._aborted.values()
        }


def main() -> None:
    """Live as the argument says, and write the numbers and the tokens of answers."""
    (text,) = sys.argv[1:]
    life = json.loads(text)
    rng = random.Random(life["seed"])
    with ExitStack() as stack:
        stack.enter_context(small_segments())
        disk = FaultyDisk(rng, calls_left=life["calls_left"], is_real=True)
        stack.enter_context(disk.installed())
        if life["file_bytes"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (life["file_bytes"], life["file_bytes"]))
        settings = {"prefix_cache_dir": life["folder"], **life["settings"]}
        engine = new_engine(life["model"], "numpy", **settings)
        print("ready", flush=True)
        for number, (token_ids, salt) in enumerate(life["asks"]):
            params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
            lived = Life(engine, [(token_ids, params, salt)])
            while lived.step():
                pass
            (answer,) = lived.answers[0]
            print(json.dumps([number, answer[0]]), flush=True)
        tier = tier_of(engine)
        tier.close()
        stats = tier.store.stats
        print(json.dumps(["end", tier.num_hits, stats.num_damaged, stats.num_dropped]), flush=True)


if __name__ == "__main__":
    main()
