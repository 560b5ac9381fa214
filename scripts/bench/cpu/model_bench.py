"""Measure one model of bench_cpu.py: prepare its files, start its children, run its rounds."""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.cpu.engines import EngineSpec
from bench.cpu.metrics import (
    BASELINE,
    END_TO_END,
    ONE_BY_ONE,
    CpuWorkload,
    Limits,
    ModelResults,
    Sample,
    rate,
)
from bench.cpu.shapes import Costs, Format, random_prompts, write_model
from bench.harness import SCRIPTS, in_turn, run_child, user_environment
from mie.system.resources import available_bytes

MIN_SECONDS = 1.0
WARM_UP = (8, 16, 8)
"""Requests, prompt tokens and new tokens of the first call. Its tokens are compared."""
FORMATS = {
    BASELINE: Format(weight=4, cache=4),
    "transformers-f32": Format(weight=4, cache=4),
    "transformers-bf16": Format(weight=2, cache=2),
    "llama.cpp-F32": Format(weight=4, cache=2),  # its cache is F16 unless told otherwise
    "llama.cpp-F16": Format(weight=2, cache=2),
    "llama.cpp-Q8_0": Format(weight=34 / 32, cache=2),
    "ctranslate2-float32": Format(weight=4, cache=4),
    "ctranslate2-int8": Format(weight=1, cache=4),
}
ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
ROOM = 600 << 20
"""A generous estimate of the memory of a process beside weights and cache, in bytes."""


# The engines.


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An engine in the tables."""

    name: str
    family: str
    kind: str
    stored: Format
    settings: dict[str, Any] = field(default_factory=dict)


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE words. Values are Python literals, or else strings.

    Raises:
        ValueError: a word has no "=".
    """
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise ValueError(f"a setting is KEY=VALUE; got {word!r}")
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    return settings


def entries_of(names: Sequence[str], common: Sequence[str], variants: Sequence[str]) -> list[Entry]:
    """Return the engines named one by one or by family, mie's first.

    mie has a row with the ``common`` settings, and one for each NAME:KEY=VALUE,... of ``variants``.
    """
    mine = [_mie_entry(BASELINE, parse_settings(common))]
    for variant in variants:
        name, colon, words = variant.partition(":")
        if not (name and colon):
            raise ValueError(f"a variant is NAME:KEY=VALUE,...; got {variant!r}")
        settings = parse_settings([*common, *words.split(",")])
        mine.append(_mie_entry(f"{BASELINE} {name}", settings))
    entries: list[Entry] = []
    for name, stored in FORMATS.items():
        family, _, kind = name.partition("-")
        if name in names or family in names:
            entry = Entry(name=name, family=family, kind=kind, stored=stored)
            entries += mine if name == BASELINE else [entry]
    return entries


def _mie_entry(name: str, settings: dict[str, Any]) -> Entry:
    cache = ITEMSIZES.get(settings.get("dtype", "float32"), 4)
    # The files are bfloat16, which backend jit keeps unless it is told to widen them.
    keeps = settings.get("backend", "auto") in ("auto", "jit")
    weight = ITEMSIZES.get(settings.get("weight_dtype", "auto"), 2 if keeps else cache)
    stored = Format(weight=weight, cache=cache)
    return Entry(name=name, family=BASELINE, kind="f32", stored=stored, settings=settings)


def grouped(needs: Mapping[str, float], limit: float) -> list[list[str]]:
    """Return the names in groups whose memory stays under ``limit`` if possible.

    The first name is in each group.
    """
    first, *others = needs
    groups = [[first]]
    for name in others:
        members = [*groups[-1], name]
        if len(members) > 2 and sum(needs[each] for each in members) > limit:
            groups.append([first])
        groups[-1].append(name)
    return groups


# The children.


class PeerError(Exception):
    """An engine cannot be measured. The message says why it is skipped."""


class Child:
    """An engine in its own process, which runs only during a call of `generate`."""

    def __init__(self, python: str, spec: EngineSpec) -> None:
        """Start the process and wait until it has loaded or prepared the model.

        Raises:
            PeerError: it did not.
        """
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        try:
            self._process = subprocess.Popen(
                [python, "-m", "bench.cpu.engines", json.dumps(asdict(spec))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=user_environment(),
                cwd=SCRIPTS,
            )
        except OSError as error:
            self._stderr.close()
            raise PeerError(str(error)) from error
        try:
            ready = self._answer()
        except PeerError:
            self.close()
            raise
        self.version: str = ready["ready"]
        self.load_seconds: float = ready.get("load_seconds", 0.0)
        self.peak_bytes: int = ready.get("peak_bytes", 0)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_new_tokens: int, one_by_one: bool = False
    ) -> dict[str, Any]:
        """Return the tokens, their times (see `engines.Generated`) and the seconds of the call."""
        self._process.send_signal(signal.SIGCONT)
        request = {"prompts": prompts, "num_new_tokens": num_new_tokens, "one_by_one": one_by_one}
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(self._ending()) from None
        answer = self._answer()
        self.peak_bytes = answer["peak_bytes"]
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _answer(self) -> dict[str, Any]:
        """Return the child's next line, and stop the child."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._ending())
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise PeerError(answer["failed"])
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def _ending(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().strip().splitlines()
        return f"its process ended with {code}" + (f": {said[-1]}" if said else "")


def agreement(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> str:
    """Return how many tokens are equal before each prompt's first difference, in total."""
    same = sum(
        len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True))))
        for a, b in zip(tokens, others, strict=True)
    )
    return f"{same} of {sum(map(len, others))}"


# The rounds.


class ModelBench:
    """The engines on one model, whose files are in ``directory``."""

    def __init__(self, name: str, directory: Path, args: argparse.Namespace) -> None:
        self._args = args
        self._directory = directory
        self._config = write_model(name, directory)
        self._entries: dict[str, Entry] = {each.name: each for each in args.entries}
        self._first_tokens: list[list[int]] | None = None
        self._seeds = itertools.count(1)
        longest = self._config.max_position_embeddings
        self.results = ModelResults(
            name=name,
            costs=Costs.of(self._config),
            formats={entry.name: entry.stored for entry in args.entries},
            workloads={each.name: each for each in args.workloads if each.length <= longest},
        )
        self.skipped = [
            f"{name}: {each.name} (its {each.length} tokens exceed the model's positions)"
            for each in args.workloads
            if each.length > longest
        ]

    def run(self) -> ModelResults | None:
        """Measure every group. Return None if no engine could be measured."""
        for entry in list(self._entries.values()):
            with self._skipping(entry.name):
                Child(self._python(entry), replace(self._spec(entry), prepare=True)).close()
        weights = self.results.costs.num_parameters
        needs = {
            name: 1.15 * weights * entry.stored.weight + self._cache_bytes(entry) + ROOM
            for name, entry in self._entries.items()
        }
        for number, names in enumerate(grouped(needs, 0.85 * available_bytes()) if needs else []):
            self._run_group(number, names)
        return self.results if self.results.samples else None

    def _run_group(self, group: int, names: Sequence[str]) -> None:
        print(f"{self.results.name}: {', '.join(names)}", flush=True)
        self._measure_limits()
        children: dict[str, Child] = {}
        with contextlib.ExitStack() as stack:
            for name in names:
                with self._skipping(name, children):
                    entry = self._entries[name]
                    child = Child(self._python(entry), self._spec(entry))
                    stack.callback(child.close)
                    self._warm_up(name, child)
                    children[name] = child
            for workload in self.results.workloads.values():
                lanes = [(name, False) for name in children]
                if workload.measures == END_TO_END:
                    lanes += [(n, True) for n in children if n.startswith("transformers")]
                for number in range(self._args.rounds):
                    for name, one_by_one in in_turn(lanes, number):
                        if name in children:
                            with self._skipping(name, children):
                                moment = (group, number)
                                self._measure(moment, workload, name, children[name], one_by_one)
            for name, child in children.items():
                self.results.loaded[name]["peak_bytes"] = child.peak_bytes
        self._measure_limits()

    def _warm_up(self, name: str, child: Child) -> None:
        num_requests, length, num_new_tokens = WARM_UP
        prompts = random_prompts(self._config.vocab_size, num_requests, length, seed=0)
        loaded_bytes = child.peak_bytes
        tokens = child.generate(prompts, num_new_tokens)["tokens"]
        self._first_tokens = self._first_tokens or tokens
        self.results.loaded[name] = {
            "version": child.version,
            "load_seconds": child.load_seconds,
            "loaded_bytes": loaded_bytes,
            "peak_bytes": child.peak_bytes,
            "agreement": agreement(tokens, self._first_tokens),
        }

    def _measure(
        self,
        moment: tuple[int, int],
        workload: CpuWorkload,
        name: str,
        child: Child,
        one_by_one: bool,
    ) -> None:
        answers: list[dict[str, Any]] = []
        min_seconds = 0.0 if self._args.quick else MIN_SECONDS
        count = self._args.baseline_requests if one_by_one else workload.num_requests
        while not answers or sum(each["seconds"] for each in answers) < min_seconds:
            size = (count, workload.prompt_length)
            prompts = random_prompts(self._config.vocab_size, *size, seed=next(self._seeds))
            answers.append(child.generate(prompts, workload.num_new_tokens, one_by_one))
        row = name + ONE_BY_ONE * one_by_one
        times = [each["times"] for each in answers]
        try:
            result = statistics.median(rate(workload, each) for each in times)
        except ValueError as error:
            self._skip(f"{row} on {workload.name}", error)
            return
        first = statistics.median(statistics.median(each[0] for each in one) for one in times)
        self.results.samples.append(
            Sample(
                engine=row,
                workload=workload.name,
                moment=moment,
                rate=result,
                time_to_first_token=first,
            )
        )
        print(f"  {workload.name}, round {moment[1] + 1}: {row} {result:.1f} tokens/s")

    @contextlib.contextmanager
    def _skipping(self, name: str, children: dict[str, Child] | None = None) -> Iterator[None]:
        """Skip an engine that fails, by name and with the reason, and go on."""
        try:
            yield
        except PeerError as error:
            self._skip(name, error)
            if children is None:
                del self._entries[name]
            else:
                children.pop(name, None)

    def _skip(self, what: str, reason: Exception) -> None:
        self.skipped.append(f"{self.results.name}: {what} ({reason})")
        print(f"skipped {self.skipped[-1]}", flush=True)

    def _measure_limits(self) -> None:
        """Keep the best limits of the machine so far."""
        python = self._args.python.get(BASELINE, sys.executable)
        found = run_child(
            "bench.cpu.limits",
            arguments=[str(self._args.threads)],
            python=python,
            OPENBLAS_NUM_THREADS="1",
        )
        best = {name: max(value, found[name]) for name, value in vars(self.results.limits).items()}
        self.results.limits = Limits(**best)

    def _cache_bytes(self, entry: Entry) -> int:
        """Return the bytes of the cache of the largest workload.

        Each request is rounded up to whole blocks of any size.
        """
        sizes = [(WARM_UP[0], sum(WARM_UP[1:]))]
        sizes += [(each.num_requests, each.length) for each in self.results.workloads.values()]
        num_tokens = max(num_requests * (length + 128) for num_requests, length in sizes)
        return int(num_tokens * self.results.costs.num_kv_numbers * entry.stored.cache)

    def _python(self, entry: Entry) -> str:
        return str(self._args.python.get(entry.family, sys.executable))

    def _spec(self, entry: Entry) -> EngineSpec:
        workloads = self.results.workloads.values()
        return EngineSpec(
            family=entry.family,
            kind=entry.kind,
            directory=str(self._directory),
            converted=str(self._directory / entry.name),
            threads=self._args.threads,
            max_num_seqs=max(each.num_requests for each in workloads),
            max_model_len=max(each.length for each in workloads),
            kv_cache_bytes=self._cache_bytes(entry),
            settings=entry.settings,
        )
