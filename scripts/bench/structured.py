"""Measure the cost of structured outputs, and the gain of taking determined tokens at once.

    python scripts/benchmark.py structured [--parts steps masks forced] [--rounds 4]

* ``steps``: a step of 64 decodes, all free or all constrained. Only steps with 64 rows and nothing
  else are compared, so that the model computes the same. Records are sampled one by one, because
  their determined tokens would add rows to other steps. Text has no determined tokens, so its steps
  include the search for them. The table has medians of ``Engine.step``, and the ratios of
  neighbouring turns.
* ``masks``: CPU time of one mask for a large vocabulary, over random runs, and of the masks of 64
  rows together.
* ``forced``: whole answers with determined tokens taken at once or one by one, in alternating
  turns, and the share of such tokens.

SmolLM2-135M has its published shape, random weights and a synthetic tokenizer.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Spread, in_turn, parser_of
from bench.models import write_model, write_tokenizer
from mie import LLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from mie.base.stats.step import StepStats
from mie.structured.grammars import Grammars
from mie.text.tokenizer import Tokenizer

NUM_STREAMS = 64
PROMPTS = ("Once upon a time", "Tell me a story about Mia the fox", "The old mill by the lake")
VOCABULARY = 151_936
"""Size of the vocabulary of Qwen's models."""

NAME = {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": NAME,
        "animal": {"enum": ["fox", "otter", "owl", "hedgehog", "tiger"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "place": {"type": "string", "maxLength": 20},
        "friends": {"type": "array", "items": NAME, "maxItems": 3},
    },
    "required": ["name", "animal", "age", "place", "friends"],
    "additionalProperties": False,
}
EBNF = r"""
root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (string ":" value ("," string ":" value)*)? "}"
array ::= "[" (value ("," value)*)? "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
"""
"""JSON, as grammars of llama.cpp describe it."""
ENDLESS = {"type": "array", "items": RECORD, "minItems": 1000}
TEXT = {"type": "string", "minLength": 100_000}
OUTPUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "records, one by one": (ENDLESS, {"max_forced_run": 0}),
    "text": (TEXT, {}),
}
"""Schemas of endless outputs, and settings of the engine."""


def new_llm(model: str, folder: Path, **settings: Any) -> LLM:
    """Load the bundled model, or one of a published shape."""
    settings = {"max_num_seqs": NUM_STREAMS, "max_model_len": 512, **settings}
    if model != "bundled":
        write_model(model, folder, has_weights=False)
        model, settings["load_format"] = str(folder), "dummy"
    return LLM(model, **settings)


def constrained(schema: dict[str, Any], **params: Any) -> SamplingParams:
    """Return the parameters of an output that follows a schema."""
    return SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), **params)


# Steps.


def step_seconds(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    """Return the median time of the steps in which all streams decode and nothing else happens."""
    seconds: list[float] = []

    def observe(stats: StepStats) -> None:
        if stats.num_decode_tokens == NUM_STREAMS and not stats.num_prefill_tokens:
            seconds.append(stats.seconds)

    llm.engine.observers.append(observe)
    llm.generate(prompts, params, use_tqdm=False)
    llm.engine.observers.remove(observe)
    assert params.max_tokens is not None
    assert len(seconds) > params.max_tokens // 2, "too few steps have the same work"
    return statistics.median(seconds)


def measure_steps(model: str, output: str, folder: Path, rounds: int, tokens: int) -> None:
    """Print how much longer a constrained step takes."""
    schema, settings = OUTPUTS[output]
    llm = new_llm(model, folder, enable_prefix_caching=False, **settings)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(NUM_STREAMS)]
    for temperature in (1.0, 0.0):
        final = RequestOutputKind.FINAL_ONLY
        options: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens": tokens,
            "output_kind": final,
        }
        kinds = {
            "free": SamplingParams(**options, ignore_eos=True),
            "constrained": constrained(schema, **options),
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(rounds + 1):  # the first warms up
            for kind in in_turn(kinds, turn):
                seconds = step_seconds(llm, prompts, kinds[kind])
                if turn:
                    found[kind].append(seconds)
        free, bound = (1e3 * statistics.median(each) for each in found.values())
        ratio = Spread.of(b / a for a, b in zip(*found.values(), strict=True))
        print(f"| {model} | {output} | {temperature:g} | {free:.2f} | {bound:.2f} | {ratio} |")


# Masks.


def measure_masks(folder: Path, vocab_size: int, seconds: float) -> None:
    """Print the time of a mask for a large vocabulary, and of the masks of 64 rows."""
    tokenizer = Tokenizer.load(write_tokenizer(folder, vocab_size), vocab_size)
    began = time.perf_counter()
    grammars = Grammars(tokenizer, vocab_size, [2])
    structures = {
        "JSON schema": StructuredOutputsParams(json=RECORD),
        "JSON schema with whitespace": StructuredOutputsParams(
            json=RECORD, disable_any_whitespace=False
        ),
        "JSON object": StructuredOutputsParams(json_object=True),
        "regex": StructuredOutputsParams(regex=r"([A-Z][a-z]+ ){3,6}[0-9]{1,4}\."),
        "EBNF": StructuredOutputsParams(grammar=EBNF),
    }
    for structure in structures.values():
        grammars.start(structure)
    print(f"indexing {vocab_size:,} tokens: {time.perf_counter() - began:.1f} s")
    print(
        "| grammar | mask: median µs | p90 | p99 | p99.9 | most | a token accepted: median µs "
        "| 64 masks: median ms | p99 |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rng = random.Random(0)
    for name, structure in structures.items():
        masks, accepts = mask_times(partial(grammars.start, structure), rng, seconds)
        quantiles = [np.quantile(masks, q) for q in (0.5, 0.9, 0.99, 0.999, 1.0)]
        numbers = " | ".join(f"{1e6 * value:.0f}" for value in quantiles)
        together = batch_times(partial(grammars.start, structure), rng, seconds)
        middle, slow = (1e3 * np.quantile(together, q) for q in (0.5, 0.99))
        accept = 1e6 * statistics.median(accepts)
        print(f"| {name} | {numbers} | {accept:.1f} | {middle:.2f} | {slow:.2f} |", flush=True)


def batch_times(start: Callable[[], Any], rng: random.Random, seconds: float) -> list[float]:
    """Return the CPU times of the masks of 64 rows, step by step. A row that ends begins again."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    matchers = [start() for _ in range(NUM_STREAMS)]
    while time.perf_counter() < end:
        began = time.thread_time()
        masks = [matcher.mask() for matcher in matchers]
        times.append(time.thread_time() - began)
        for row, mask in enumerate(masks):
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            token_id = int(rng.choice(np.flatnonzero(bits)))
            if token_id == 2:
                matchers[row] = start()
            else:
                matchers[row].accept(token_id)
    return times


def mask_times(
    start: Callable[[], Any], rng: random.Random, seconds: float
) -> tuple[list[float], list[float]]:
    """Return the CPU times of masks and of accepted tokens in random runs."""
    masks: list[float] = []
    accepts: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        matcher, token_id = start(), -1
        for _ in range(100):
            began = time.thread_time()
            mask = matcher.mask()
            masks.append(time.thread_time() - began)
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            token_id = int(rng.choice(np.flatnonzero(bits)))
            if token_id == 2:
                break
            began = time.thread_time()
            matcher.accept(token_id)
            accepts.append(time.thread_time() - began)
    return masks, accepts


# Determined tokens.


def measure_forced(rounds: int) -> None:
    """Print the gain of taking determined tokens at once, and their share."""
    at_once, one_by_one = (LLM("bundled", max_forced_run=run) for run in (32, 0))
    for streams in (1, 8, 64):
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(streams)]
        params = [constrained(RECORD, max_tokens=200, seed=i) for i in range(streams)]
        speeds: dict[str, list[float]] = {"at once": [], "one by one": []}
        share = 0.0
        engines = {"at once": at_once, "one by one": one_by_one}
        for turn in range(rounds + 1):
            for name in in_turn(engines, turn):
                began = time.perf_counter()
                outputs = engines[name].generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - began
                num_tokens = sum(len(each.outputs[0].token_ids) for each in outputs)
                if turn:
                    speeds[name].append(num_tokens / seconds)
                if name == "at once":
                    forced = [each.metrics.num_forced_tokens for each in outputs if each.metrics]
                    share = sum(forced) / num_tokens
        ratio = Spread.of(a / b for a, b in zip(*speeds.values(), strict=True))
        medians = " | ".join(f"{statistics.median(each):,.0f}" for each in speeds.values())
        print(f"| {streams} | {share:.0%} | {medians} | {ratio} |", flush=True)


def main(argv: Sequence[str]) -> None:
    """Run the parts."""
    parser = parser_of("structured", __doc__)
    parts = ("steps", "masks", "forced")
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--models", nargs="+", default=["bundled", "SmolLM2-135M"])
    parser.add_argument("--outputs", nargs="+", default=[*OUTPUTS], choices=OUTPUTS)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens of the masks")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a stream in a turn")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if "steps" in args.parts:
            print("| model | output | temperature | free ms | constrained ms | ratio |")
            print("|---|---|---|---|---|---|")
            for model in args.models:
                for output in args.outputs:
                    measure_steps(model, output, Path(folder), args.rounds, args.tokens)
        if "masks" in args.parts:
            measure_masks(Path(folder), args.vocabulary, seconds=2)
        if "forced" in args.parts:
            print("| streams | determined | at once, tokens/s | one by one | ratio |")
            print("|---|---|---|---|---|")
            measure_forced(args.rounds)
