"""State the goals of mie's rows in bench_cpu.py.

They hold with two threads, float32 and random weights, all in one run. OpenBLAS chooses its kernels
on a machine with AVX-512, except for the last goal, where no engine uses AVX-512
(--without-avx512).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.cpu.metrics import CONTEXT, attention_share
from bench.cpu.results import BASELINE, ONE_BY_ONE, ModelResults, ratio, row_of, samples_of

TINY, SMOL = "TinyLlama-1.1B", "SmolLM2-135M"
LLAMA_F32, TORCH_F32 = "llama.cpp-F32", "transformers-f32"
Value = Callable[[ModelResults, str], float | None]
"""Returns a number for a model's results and one of mie's rows."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a row of mie must reach, and what it aims at."""

    text: str
    model: str
    value: Value
    must: float
    aim: float | None
    is_share: bool = False
    less_is_better: bool = False
    avx512: bool = True


def times(workload: str, peer: str) -> Value:
    """Return a function that computes the median ratio to a peer."""

    def value(results: ModelResults, engine: str) -> float | None:
        spread = ratio(results, workload, engine, peer)
        return None if spread is None else spread.median

    return value


def of_row(workload: str, attribute: str) -> Value:
    """Return a function that looks up an attribute of the row."""

    def value(results: ModelResults, engine: str) -> float | None:
        if not samples_of(results, workload, engine):
            return None
        found: float | None = getattr(row_of(results, workload, engine), attribute)
        return found

    return value


def attention(results: ModelResults, engine: str) -> float | None:
    """Return the share of the bandwidth that attention reaches at a long context."""
    pair = []
    for name in (CONTEXT.name, "decode-16"):
        rates = [each.rate for each in samples_of(results, name, engine)]
        if not rates:
            return None
        pair.append((results.workloads[name], statistics.median(rates)))
    stored = results.formats[engine]
    return attention_share(pair[0], pair[1], results.costs, stored, results.limits)


GOALS = (
    Goal(
        text="decode, 64 requests, against llama.cpp F32",
        model=TINY,
        value=times("decode-64", LLAMA_F32),
        must=1.35,
        aim=1.7,
    ),
    Goal(
        text="the same, against transformers, one static batch",
        model=TINY,
        value=times("decode-64", TORCH_F32),
        must=2.2,
        aim=3,
    ),
    Goal(
        text="64 requests end to end, against transformers one by one",
        model=TINY,
        value=times("end-to-end-64", TORCH_F32 + ONE_BY_ONE),
        must=25,
        aim=31,
    ),
    Goal(
        text="decode, 1 request, of the bandwidth",
        model=TINY,
        value=of_row("decode-1", "bandwidth_share"),
        must=0.80,
        aim=0.95,
        is_share=True,
    ),
    Goal(
        text="the same, against llama.cpp F32",
        model=TINY,
        value=times("decode-1", LLAMA_F32),
        must=0.9,
        aim=1.05,
    ),
    Goal(
        text="decode, 1 request, against llama.cpp F32",
        model=SMOL,
        value=times("decode-1", LLAMA_F32),
        must=0.75,
        aim=1.0,
    ),
    Goal(
        text="prefill, against llama.cpp F32",
        model=TINY,
        value=times("prefill-1", LLAMA_F32),
        must=1.5,
        aim=None,
    ),
    Goal(
        text="the same, of the best sgemm",
        model=TINY,
        value=of_row("prefill-1", "sgemm_share"),
        must=0.65,
        aim=0.80,
        is_share=True,
    ),
    Goal(
        text="attention at context 4,096, 16 requests, of the bandwidth",
        model=TINY,
        value=attention,
        must=0.50,
        aim=0.85,
        is_share=True,
    ),
    Goal(
        text="everything but forward pass and sampling, 64 requests, of the step",
        model=TINY,
        value=of_row("decode-64", "overhead"),
        must=0.03,
        aim=0.01,
        is_share=True,
        less_is_better=True,
    ),
    Goal(
        # Transformers' static batch is no fair peer here. Five times its speed needs 270 GFLOP/s
        # (5 x 8,000 tokens/s x 6.8 MFLOP), which is more than two of these cores can multiply.
        text="64 requests end to end, against transformers one by one",
        model="bundled",
        value=times("end-to-end-64", TORCH_F32 + ONE_BY_ONE),
        must=5,
        aim=10,
    ),
    Goal(
        text="decode, 64 requests, against llama.cpp F32, both without AVX-512",
        model=TINY,
        value=times("decode-64", LLAMA_F32),
        must=1.0,
        aim=1.3,
        avx512=False,
    ),
)


def verdict(goal: Goal, value: float) -> str:
    """Return "aim", "must" or "missed"."""
    for word, bound in (("aim", goal.aim), ("must", goal.must)):
        if bound is not None and (value <= bound if goal.less_is_better else value >= bound):
            return word
    return "missed"


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A goal, and how close each of mie's rows came to it."""

    goal: Goal
    values: dict[str, float]


def goals_reached(all_results: Sequence[ModelResults], *, avx512: bool) -> list[Reached]:
    """Return each goal that was measured."""
    found = []
    for goal in GOALS:
        for results in all_results:
            if results.name != goal.model or goal.avx512 != avx512:
                continue
            engines = [engine for engine in results.formats if engine.split()[0] == BASELINE]
            values = {engine: goal.value(results, engine) for engine in engines}
            measured = {name: value for name, value in values.items() if value is not None}
            if measured:
                found.append(Reached(goal=goal, values=measured))
    return found
