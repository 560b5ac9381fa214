"""List the chapters by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mie.sim.book import batching, capacity, chunking, engine, policies, prefix, pressure
from mie.sim.book.chapter import Chapter

CHAPTERS: Mapping[str, Chapter] = MappingProxyType(
    {
        "capacity": capacity,
        "batching": batching,
        "prefix": prefix,
        "pressure": pressure,
        "chunking": chunking,
        "policies": policies,
        "engine": engine,
    }
)
"""The modules of the chapters, by the names in `TITLES`."""
