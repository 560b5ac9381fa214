"""Measure generation on a CPU, with mie and other engines in the same run.

    pip install '.[bench]'
    python scripts/benchmark.py cpu [--models NAME ...] [--engines NAME ...] [--workloads NAME ...]
                                    [--mie-variant NAME:KEY=VALUE,...] [--output PREFIX]
    python scripts/benchmark.py cpu --files FILE.gguf ...

The models have published shapes and random weights; the bundled model is measured too. Sampling is
greedy, and the end-of-sequence token is disabled. mie runs through its LLM API and its scheduler.
The peers are transformers (`generate`, one static batch), llama.cpp (the batch API of
llama-cpp-python) and CTranslate2 (`generate_batch`). A peer that is not installed, or that does not
support a shape, is skipped by name with the reason. The name of a quantised GGUF type, such as
Q4_0, runs mie and llama.cpp on the same file. `--files` runs them on published files instead of the
models. There, ik_llama.cpp may run too, from its wheel (see `IkLlamaCppEngine`).

All engines of a run are loaded at once, each in its own process on the same CPUs, and are stopped
while another is measured. In a round, every engine runs one workload, in alternating order. A round
below one second is repeated until a second has passed, and counts with its median. Tables show
medians over rounds (least–most). Ratios are taken within a round. llama.cpp on a quantised file is
compared with mie on that file.

decode        tokens per second of the steps in which every request is between its first and its
              last token. Steps that compute prompts do not count.
prefill       prompt tokens per second, up to the last request's first token.
end to end    new tokens per second, from the first request's arrival to the last token.

The machine's best rates with as many threads are measured before each model (bench/limits.py).
"""

import argparse
import ast
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.child import Child, PeerError
from bench.engines import FILE, GGUF_TYPES, EngineSpec
from bench.harness import (
    Spread,
    in_turn,
    machine,
    number,
    parser_of,
    run_child,
    table,
    write_report,
)
from bench.models import BUNDLED, SHAPES, random_prompts, write_model
from mie.checkpoint.config import load_model_config
from mie.model.config import ModelConfig

BASELINE = "mie"
DECODE, PREFILL, END_TO_END = "decode", "prefill", "end to end"
MODELS = ("TinyLlama-1.1B", "Qwen2.5-0.5B", "SmolLM2-135M", BUNDLED)
KINDS = {
    BASELINE: ("f32",),
    "transformers": ("f32", "bf16"),
    "llama.cpp": ("F32", "F16"),
    "ctranslate2": ("float32", "int8"),
}
"""The dtypes of each engine. mie's own is a setting."""
FILE_ENGINES = ("llama.cpp", "ik_llama.cpp")
"""The engines that read published files, beside mie."""
SHORT = 16
"""Tokens of a prompt whose length does not matter."""
MIN_SECONDS = 1.0
WARM_UP = (8, 16, 8)
"""Requests, prompt tokens and new tokens of the first call. Tokens are compared."""


@dataclass(frozen=True, kw_only=True)
class CpuWorkload:
    """Requests that arrive at once, with prompts of one length."""

    measures: str
    num_requests: int
    prompt_length: int
    num_new_tokens: int

    @property
    def name(self) -> str:
        """The name on the command line."""
        is_long = self.measures == DECODE and self.prompt_length > SHORT
        after = f"-after-{self.prompt_length}" if is_long else ""
        return f"{self.measures.replace(' ', '-')}-{self.num_requests}{after}"

    def rate(self, times: Sequence[Sequence[float]]) -> float:
        """Return tokens per second. ``times`` has the time of each token of each request.

        Raises:
            ValueError: all requests were never decoding at the same time.
        """
        if self.measures == PREFILL:
            return len(times) * self.prompt_length / max(each[0] for each in times)
        if self.measures == END_TO_END:
            return sum(map(len, times)) / max(each[-1] for each in times)
        start, end = max(each[0] for each in times), min(each[-1] for each in times)
        if end <= start:
            raise ValueError("a request ended before the last one had a token (more new tokens)")
        return sum(start < when <= end for each in times for when in each) / (end - start)


WORKLOADS = {
    each.name: each
    for each in (
        *(
            CpuWorkload(measures=DECODE, num_requests=count, prompt_length=SHORT, num_new_tokens=48)
            for count in (1, 4, 8, 16, 64)
        ),
        *(
            CpuWorkload(measures=PREFILL, num_requests=count, prompt_length=512, num_new_tokens=1)
            for count in (1, 4)
        ),
        CpuWorkload(measures=END_TO_END, num_requests=64, prompt_length=SHORT, num_new_tokens=150),
        CpuWorkload(measures=DECODE, num_requests=1, prompt_length=2000, num_new_tokens=48),
    )
}


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE words. Values are Python literals, or else strings.

    Raises:
        ValueError: a word has no "=".
    """
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise ValueError(f"a setting is KEY=VALUE; got {word!r}")
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    return settings


Rows = dict[str, tuple[str, str, dict[str, Any]]]
"""Family, dtype and settings of each row of the tables."""


def rows_of(names: Sequence[str], common: Sequence[str], variants: Sequence[str]) -> Rows:
    """Return the rows of engines named one by one ("llama.cpp-F16") or by family, mie's first.

    mie has a row with the ``common`` settings, and one for each NAME:KEY=VALUE,... of ``variants``.
    A type of GGUF files has a row of mie and one of llama.cpp.
    """
    rows: Rows = {BASELINE: (BASELINE, "f32", parse_settings(common))}
    for variant in variants:
        name, colon, words = variant.partition(":")
        if not (name and colon):
            raise ValueError(f"a variant is NAME:KEY=VALUE,...; got {variant!r}")
        settings = parse_settings([*common, *words.split(",")])
        rows[f"{BASELINE} {name}"] = (BASELINE, "f32", settings)
    for family, kinds in list(KINDS.items())[1:]:
        for kind in kinds:
            if family in names or f"{family}-{kind}" in names:
                rows[f"{family}-{kind}"] = (family, kind, {})
    for kind in GGUF_TYPES:
        if kind in names:
            rows[f"{BASELINE}-{kind}"] = (BASELINE, kind, parse_settings(common))
            rows[f"llama.cpp-{kind}"] = ("llama.cpp", kind, {})
    return rows


def rows_of_files(names: Sequence[str], common: Sequence[str], variants: Sequence[str]) -> Rows:
    """Return the rows of engines that read a published file."""
    if others := set(names) - {BASELINE, *FILE_ENGINES}:
        readers = ", ".join(FILE_ENGINES)
        raise ValueError(f"--files has rows of mie, {readers}; got {', '.join(sorted(others))}")
    rows = {row: (BASELINE, FILE, each[2]) for row, each in rows_of((), common, variants).items()}
    return rows | {name: (name, FILE, {}) for name in FILE_ENGINES if name in names}


class ModelBench:
    """The engines on one model: a directory, or a file."""

    def __init__(
        self, name: str, directory: Path, config: ModelConfig, args: argparse.Namespace
    ) -> None:
        self._name, self._directory, self._args = name, directory, args
        self._config = config
        longest = config.max_position_embeddings
        self._workloads = [
            each for each in args.workloads if each.prompt_length + each.num_new_tokens <= longest
        ]
        self._seeds = itertools.count(1)
        self.skipped: list[str] = []
        self.loaded: dict[str, dict[str, Any]] = {}
        self.samples: defaultdict[str, defaultdict[str, dict[int, tuple[float, float]]]]
        self.samples = defaultdict(lambda: defaultdict(dict))
        """By workload, row and round: tokens per second and the first token's seconds."""

    def run(self) -> None:
        """Measure every row."""
        with contextlib.ExitStack() as stack:
            children: dict[str, Child] = {}
            for row in self._args.rows:
                with self._skipping(row, children):
                    children[row] = self._start(row)
                    stack.callback(children[row].close)
                    self._warm_up(row, children[row])
            for workload in self._workloads:
                for turn in range(self._args.rounds):
                    for row in in_turn(list(children), turn):
                        with self._skipping(row, children):
                            self._measure(workload, row, turn, children[row])
            for row, child in children.items():
                self.loaded[row]["peak_bytes"] = child.facts["peak_bytes"]

    def _start(self, row: str) -> Child:
        family, kind, settings = self._args.rows[row]
        spec = EngineSpec(
            family=family,
            kind=kind,
            directory=str(self._directory),
            threads=self._args.threads,
            max_num_seqs=max(each.num_requests for each in self._workloads),
            max_model_len=max(each.prompt_length + each.num_new_tokens for each in self._workloads),
            settings=settings,
        )
        if kind != FILE:
            writer = "llama.cpp" if kind in GGUF_TYPES else family
            self._child(replace(spec, family=writer, prepare=True)).close()
        return self._child(spec)

    def _child(self, spec: EngineSpec) -> Child:
        return Child(spec, self._args.python.get(spec.family, sys.executable))

    def _warm_up(self, row: str, child: Child) -> None:
        num_requests, length, num_new_tokens = WARM_UP
        prompts = random_prompts(self._config.vocab_size, num_requests, length, seed=0)
        loaded = child.facts["peak_bytes"]
        tokens = child.generate(prompts, num_new_tokens)["tokens"]
        baseline = self._baseline(row)
        first = self.loaded[baseline]["tokens"] if baseline in self.loaded else tokens
        same = sum(a == b for a, b in zip(tokens, first, strict=True))
        facts = {"version": child.facts["ready"], "load_seconds": child.facts["load_seconds"]}
        facts |= {"loaded_bytes": loaded, "tokens": tokens}
        self.loaded[row] = {**facts, "same_as_mie": f"{same} of {len(tokens)}"}

    def _baseline(self, row: str) -> str:
        """Return the row of mie with the same weights, for comparison with a row."""
        family, kind, _ = self._args.rows[row]
        return f"{BASELINE}-{kind}" if kind in GGUF_TYPES and family != BASELINE else BASELINE

    def _measure(self, workload: CpuWorkload, row: str, turn: int, child: Child) -> None:
        answers: list[dict[str, Any]] = []
        least = 0.0 if self._args.quick else MIN_SECONDS
        while not answers or sum(each["seconds"] for each in answers) < least:
            size = (workload.num_requests, workload.prompt_length)
            prompts = random_prompts(self._config.vocab_size, *size, seed=next(self._seeds))
            answers.append(child.generate(prompts, workload.num_new_tokens))
        times = [each["times"] for each in answers]
        try:
            rate = statistics.median(map(workload.rate, times))
        except ValueError as error:
            self._skip(f"{row} on {workload.name}", error)
            return
        first = statistics.median(statistics.median(each[0] for each in one) for one in times)
        self.samples[workload.name][row][turn] = (rate, first)
        print(f"  {workload.name}, round {turn + 1}: {row} {rate:.1f} tokens/s", flush=True)

    @contextlib.contextmanager
    def _skipping(self, row: str, children: dict[str, Child]) -> Iterator[None]:
        """Skip an engine that fails, by name and with the reason, and go on."""
        try:
            yield
        except PeerError as error:
            self._skip(row, error)
            children.pop(row, None)

    def _skip(self, what: str, reason: Exception) -> None:
        self.skipped.append(f"{self._name}: {what} ({reason})")
        print(f"skipped {self.skipped[-1]}", flush=True)

    def tables(self, limits: Mapping[str, float]) -> Iterator[str]:
        """Yield the tables of the model: its engines, then each workload."""
        yield from (f"### {self._name}", "")
        bandwidth, sgemm = (limits[name] / 1e9 for name in ("bandwidth", "sgemm"))
        yield f"Beside it: {bandwidth:.1f} GB/s read, {sgemm:.0f} GFLOP/s in the best sgemm"
        yield ""
        heads = ("engine", "loads in, s", "peak MiB: loaded", "at the end", "same prompts")
        cells = (
            (
                row,
                f"{facts['load_seconds']:.1f}",
                *(
                    f"{(facts.get(name) or 0) / 2**20:.0f}"
                    for name in ("loaded_bytes", "peak_bytes")
                ),
                facts["same_as_mie"],
                facts["version"],
            )
            for row, facts in self.loaded.items()
        )
        yield from table((*heads, "version"), cells)
        for name, rows in self.samples.items():
            yield from ("", f"**{name}**", "")
            columns = ("engine", "tokens/s", "mie ÷ it", "TTFT, ms")
            yield from table(columns, (self._cells(row, rows) for row in rows))
        yield ""

    def _cells(self, row: str, rows: Mapping[str, dict[int, tuple[float, float]]]) -> list[str]:
        found, baseline = rows[row], rows.get(self._baseline(row), {})
        ratios = [baseline[turn][0] / found[turn][0] for turn in found.keys() & baseline.keys()]
        first = 1000 * statistics.median(seconds for _, seconds in found.values())
        ratio = f"{Spread.of(ratios)} ×" if ratios else "–"
        return [row, str(Spread.of(rate for rate, _ in found.values())), ratio, number(first)]


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of("cpu", __doc__)
    names = [*KINDS, *(f"{family}-{kind}" for family in KINDS for kind in KINDS[family])]
    names += [*GGUF_TYPES, "ik_llama.cpp"]
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group().add_argument
    what("--models", nargs="+", choices=[*SHAPES, BUNDLED], metavar="NAME")
    what("--files", nargs="+", type=Path, default=[], metavar="FILE", help="published GGUF files")
    add("--engines", nargs="+", choices=names, metavar="NAME")
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2, help="CPUs that each engine may use")
    for name, metavar, text in (
        ("--mie", "KEY=VALUE", "set an argument of LLM in all of mie's rows"),
        ("--mie-variant", "NAME:KEY=VALUE,...", "add a row of mie with these arguments"),
        ("--python", "FAMILY=PATH", "run an engine with this interpreter"),
    ):
        add(name, action="append", default=[], metavar=metavar, help=text)
    add("--quick", action="store_true", help="try the script: small workloads, one round")
    add("--output", metavar="PREFIX", help="write PREFIX.json and PREFIX.md")
    args = parser.parse_args(argv)
    if missing := [str(each) for each in args.files if not each.is_file()]:
        parser.error(f"--files names no file: {', '.join(missing)}")
    if not args.files and "ik_llama.cpp" in (args.engines or ()):
        parser.error("ik_llama.cpp needs --files")
    default = [BASELINE, "llama.cpp"] if args.files else [*KINDS]
    engines: list[str] = args.engines or default
    try:
        of_engines = rows_of_files if args.files else rows_of
        args.rows = of_engines(engines, args.mie, args.mie_variant)
    except ValueError as error:
        parser.error(str(error))
    args.python = dict(word.partition("=")[::2] for word in args.python)
    num_cpus = len(os.sched_getaffinity(0))
    if args.rounds < 1 or not 1 <= args.threads <= num_cpus:
        parser.error(f"--rounds must be at least 1, and --threads 1 to {num_cpus}")
    args.workloads = [WORKLOADS[name] for name in dict.fromkeys(args.workloads)]
    args.models = args.models or (() if args.files else ("toy", BUNDLED) if args.quick else MODELS)
    if args.quick:
        args.rounds = 1
        args.workloads = [
            replace(
                each,
                prompt_length=min(each.prompt_length, 64),
                num_new_tokens=min(each.num_new_tokens, 12),
            )
            for each in args.workloads
        ]
    return args


def main(argv: Sequence[str]) -> int:
    """Measure, and print and write the results after each model. Return 1 if mie has no result."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and so through every `finally`
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])  # children inherit it
    state = {**machine(), "threads": args.threads, "rounds": args.rounds, "rows": args.rows}
    models: dict[str, Any] = {}
    lines = [f"* {key}: {value}" for key, value in state.items()]
    for name in [*args.models, *args.files]:
        limits = run_child("bench.limits", arguments=[str(args.threads)], OPENBLAS_NUM_THREADS="1")
        with tempfile.TemporaryDirectory(prefix="mie-bench-") as folder:
            if isinstance(name, Path):
                source, config, name = name.absolute(), load_model_config(name), name.name
            else:
                source, config = Path(folder), write_model(name, Path(folder))
            bench = ModelBench(name, source, config, args)
            bench.run()
        lines += [f"* skipped: {each}" for each in bench.skipped]
        lines += ["", *bench.tables(limits)]
        models[name] = {
            "limits": limits,
            "skipped": bench.skipped,
            "loaded": bench.loaded,
            "samples": bench.samples,
        }
        write_report(args.output, {"state": state, "models": models}, lines)
    return int(not all(BASELINE in each["loaded"] for each in models.values()))
