"""The logits that an engine computes for the next token of each prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mie.config.engine_args import EngineArgs
from mie.config.params.sampling import SamplingParams
from mie.lab.diff.recording import to_host
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops.backend import Array, Backend, StepBatch


class _Tap:
    """A backend with a copy of the logits of each row, by the row's number of tokens."""

    is_asynchronous = False

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.rows: dict[int, NDArray[np.float32]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run_step(self, forward: Callable[[StepBatch], Array], batch: StepBatch) -> Array:
        logits = self._inner.run_step(forward, batch)
        lengths = batch.positions[batch.logits_rows] + 1
        found = to_host(logits[: len(lengths)])
        self.rows.update(zip(lengths.tolist(), found.astype(np.float32), strict=True))
        return logits


def next_logits(
    path: Path, prompts: Sequence[Sequence[int]], **settings: Any
) -> NDArray[np.float32]:
    """Return the logits [len(prompts), V] after prompts of different lengths, on backend jit."""
    taps: list[_Tap] = []

    def wrap(backend: Backend) -> Backend:
        taps.append(_Tap(backend))
        return cast(Backend, taps[0])  # it delegates the rest of the contract

    args = EngineArgs(
        model=str(path), backend="jit", max_model_len=256, enable_prefix_caching=False, **settings
    )
    engine = load_engine(path, LoadSettings.of(args), wrap=wrap, use_tqdm=False)
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0), str(number))
    while engine.has_work:
        engine.step()
    return np.stack([taps[0].rows[len(prompt)] for prompt in prompts])
