"""Name the engines of bench_cpu.py, and give mie's rows their settings."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.cpu.results import BASELINE
from bench.cpu.shapes import Costs, Format

FORMATS = {
    "mie": Format(weight=4, cache=4),
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
"""A generous estimate of what a process needs beside weights and cache, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An engine in the tables."""

    name: str
    family: str
    kind: str
    stored: Format
    settings: dict[str, Any] = field(default_factory=dict)

    def cache_bytes(self, costs: Costs, num_tokens: int) -> int:
        """Return the bytes of the KV cache of ``num_tokens`` tokens."""
        return int(num_tokens * costs.num_kv_numbers * self.stored.cache)

    def memory(self, costs: Costs, num_kv_tokens: int) -> float:
        """Return about how many bytes the engine needs."""
        weights = costs.num_parameters * self.stored.weight
        return 1.15 * weights + self.cache_bytes(costs, num_kv_tokens) + ROOM


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


def mie_entries(common: Sequence[str], variants: Sequence[str]) -> list[Entry]:
    """Return mie's rows: with the defaults, and with each NAME:KEY=VALUE,... of ``variants``."""
    entries = [_mie_entry(BASELINE, parse_settings(common))]
    for variant in variants:
        name, colon, words = variant.partition(":")
        if not (name and colon):
            raise ValueError(f"a variant is NAME:KEY=VALUE,...; got {variant!r}")
        settings = parse_settings([*common, *words.split(",")])
        entries.append(_mie_entry(f"{BASELINE} {name}", settings))
    return entries


def _mie_entry(name: str, settings: dict[str, Any]) -> Entry:
    cache = ITEMSIZES.get(settings.get("dtype", "float32"), 4)
    # The files are bfloat16, which backend jit keeps unless it is told to widen them.
    keeps = settings.get("backend", "auto") in ("auto", "jit")
    weight = ITEMSIZES.get(settings.get("weight_dtype", "auto"), 2 if keeps else cache)
    stored = Format(weight=weight, cache=cache)
    return Entry(name=name, family=BASELINE, kind="f32", stored=stored, settings=settings)


def entries_of(names: Sequence[str], mine: Sequence[Entry]) -> list[Entry]:
    """Return the engines named one by one or by family, mie's first."""
    entries: list[Entry] = []
    for name, stored in FORMATS.items():
        family, _, kind = name.partition("-")
        if name not in names and family not in names:
            continue
        entry = Entry(name=name, family=family, kind=kind, stored=stored)
        entries += mine if name == BASELINE else [entry]
    return entries


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
