"""Measure one model of bench_cpu.py: prepare its files, start its children, run its rounds."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.cpu.children import SCRIPTS, Child, PeerError, child_environment, prepare
from bench.cpu.engines import EngineSpec
from bench.cpu.entries import Entry, grouped
from bench.cpu.metrics import END_TO_END, CpuWorkload, Limits, Sample, sample
from bench.cpu.results import BASELINE, ONE_BY_ONE, ModelResults
from bench.cpu.shapes import Costs, random_prompts, write_model
from mie.system.resources import available_bytes

MIN_SECONDS = 1.0
WARM_UP = (8, 16, 8)
"""Requests, prompt tokens and new tokens of the first call. Its tokens are compared."""


def agreement(tokens: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> str:
    """Return how many tokens are equal before each prompt's first difference, in total."""
    same = sum(
        len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True))))
        for a, b in zip(tokens, others, strict=True)
    )
    return f"{same} of {sum(map(len, others))}"


class ModelBench:
    """The engines on one model, whose files are in ``directory``."""

    def __init__(self, name: str, directory: Path, args: argparse.Namespace) -> None:
        self._name = name
        self._args = args
        self._directory = directory
        self._config = write_model(name, directory)
        self._costs = Costs.of(self._config)
        self._environment = child_environment(args.without_avx512)
        self._entries: dict[str, Entry] = {each.name: each for each in args.entries}
        self._workloads = {
            each.name: each
            for each in args.workloads
            if each.length <= self._config.max_position_embeddings
        }
        self._loaded: dict[str, dict[str, Any]] = {}
        self._limits: list[Limits] = []
        self._samples: list[Sample] = []
        self._first_tokens: list[list[int]] | None = None
        self._seeds = itertools.count(1)
        self.skipped = [
            f"{name}: {each.name} (its {each.length} tokens exceed the model's positions)"
            for each in args.workloads
            if each.name not in self._workloads
        ]

    def run(self) -> ModelResults | None:
        """Measure every group. Return None if no engine could be measured."""
        for entry in list(self._entries.values()):
            with self._skipping(entry.name):
                prepare(self._python(entry), self._spec(entry), self._environment)
        needs = {
            name: entry.memory(self._costs, self._num_kv_tokens(entry))
            for name, entry in self._entries.items()
        }
        groups = grouped(needs, 0.85 * available_bytes()) if needs else []
        for number, names in enumerate(groups):
            self._run_group(number, names)
        if not self._samples:
            return None
        return ModelResults(
            name=self._name,
            costs=self._costs,
            limits=self._best_limits(),
            formats={name: self._entries[name].stored for name in self._loaded},
            loaded=self._loaded,
            workloads=self._workloads,
            samples=self._samples,
        )

    def _run_group(self, group: int, names: Sequence[str]) -> None:
        print(f"{self._name}: {', '.join(names)}", flush=True)
        self._measure_limits()
        children: dict[str, Child] = {}
        with contextlib.ExitStack() as stack:
            for name in names:
                with self._skipping(name, children):
                    entry = self._entries[name]
                    child = Child(self._python(entry), self._spec(entry), self._environment)
                    stack.callback(child.close)
                    if self._args.without_avx512 and "AVX512" in child.version:
                        raise PeerError(f"uses AVX-512: {child.version}; see --python")
                    self._warm_up(name, child)
                    children[name] = child
            for workload in self._workloads.values():
                self._run_workload(group, workload, children)
            for name, child in children.items():
                self._loaded[name]["peak_bytes"] = child.peak_bytes
        self._measure_limits()

    def _warm_up(self, name: str, child: Child) -> None:
        num_requests, length, num_new_tokens = WARM_UP
        prompts = random_prompts(self._config.vocab_size, num_requests, length, seed=0)
        loaded_bytes = child.peak_bytes
        tokens = child.generate(prompts, num_new_tokens)["tokens"]
        self._first_tokens = self._first_tokens or tokens
        self._loaded[name] = {
            "version": child.version,
            "load_seconds": child.load_seconds,
            "loaded_bytes": loaded_bytes,
            "peak_bytes": child.peak_bytes,
            "agreement": agreement(tokens, self._first_tokens),
        }

    def _run_workload(self, group: int, workload: CpuWorkload, children: dict[str, Child]) -> None:
        lanes = [
            (name, one_by_one)
            for name in children
            for one_by_one in (False, True)
            if workload in self._workloads_of(self._entries[name])
            and not (workload.only_mie and self._has(name, workload))  # by an earlier group
            and (not one_by_one or self._runs_one_by_one(workload, self._entries[name]))
        ]
        if workload.repeats_prompts:  # fills the prefix cache
            for name, _ in lanes:
                with self._skipping(name, children):
                    children[name].generate(self._prompts(workload, 0), 1)
        for number in range(self._args.rounds):
            for name, one_by_one in lanes if number % 2 == 0 else reversed(lanes):
                if name in children:
                    with self._skipping(name, children):
                        self._measure((group, number), workload, name, children[name], one_by_one)

    def _has(self, name: str, workload: CpuWorkload) -> bool:
        return any((each.engine, each.workload) == (name, workload.name) for each in self._samples)

    def _runs_one_by_one(self, workload: CpuWorkload, entry: Entry) -> bool:
        return entry.family == "transformers" and workload.measures == END_TO_END

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
        while not answers or sum(each["seconds"] for each in answers) < min_seconds:
            seed = 0 if workload.repeats_prompts else next(self._seeds)
            prompts = self._prompts(workload, seed)
            if one_by_one:
                prompts = prompts[: self._args.baseline_requests]
            answers.append(child.generate(prompts, workload.num_new_tokens, one_by_one))
        row = name + ONE_BY_ONE * one_by_one
        try:
            result = sample(
                workload,
                answers,
                model=self._name,
                engine=row,
                moment=moment,
                one_by_one=one_by_one,
            )
        except ValueError as error:
            self._skip(f"{row} on {workload.name}", error)
            return
        self._samples.append(result)
        print(f"  {workload.name}, round {moment[1] + 1}: {row} {result.rate:.1f} tokens/s")

    def _prompts(self, workload: CpuWorkload, seed: int) -> list[list[int]]:
        size = (workload.num_requests, workload.prompt_length)
        return random_prompts(self._config.vocab_size, *size, seed=seed)

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
        self.skipped.append(f"{self._name}: {what} ({reason})")
        print(f"skipped {self.skipped[-1]}", flush=True)

    def _measure_limits(self) -> None:
        python = self._args.python.get(BASELINE, sys.executable)
        command = [python, "-m", "bench.cpu.limits", str(self._args.threads)]
        environment = self._environment | {"OPENBLAS_NUM_THREADS": "1"}
        said = subprocess.run(
            command, env=environment, cwd=SCRIPTS, stdout=subprocess.PIPE, check=True
        ).stdout
        self._limits.append(Limits(**json.loads(said)))

    def _best_limits(self) -> Limits:
        return Limits(
            bandwidth=max(each.bandwidth for each in self._limits),
            sgemm=max(each.sgemm for each in self._limits),
        )

    def _workloads_of(self, entry: Entry) -> list[CpuWorkload]:
        is_mie = entry.family == BASELINE
        return [each for each in self._workloads.values() if is_mie or not each.only_mie]

    def _num_kv_tokens(self, entry: Entry) -> int:
        """Return the cached tokens of the largest workload.

        Each request is rounded up to whole blocks of any size.
        """
        sizes = [(WARM_UP[0], sum(WARM_UP[1:]))]
        sizes += [(each.num_requests, each.length) for each in self._workloads_of(entry)]
        return max(num_requests * (length + 128) for num_requests, length in sizes)

    def _python(self, entry: Entry) -> str:
        return str(self._args.python.get(entry.family, sys.executable))

    def _spec(self, entry: Entry) -> EngineSpec:
        return EngineSpec(
            family=entry.family,
            kind=entry.kind,
            directory=str(self._directory),
            converted=str(self._directory / entry.name),
            threads=self._args.threads,
            max_num_seqs=max(each.num_requests for each in self._workloads.values()),
            max_model_len=max(each.length for each in self._workloads.values()),
            kv_cache_bytes=entry.cache_bytes(self._costs, self._num_kv_tokens(entry)),
            settings=entry.settings,
        )
