"""Benchmark what each mechanism gains. Each chapter is a module, and its result is plain data.

This room knows the simulator. Only `engine` knows the real engine, only `plots` knows matplotlib,
and only `peer` knows torch and transformers.
"""

from collections.abc import Mapping
from types import MappingProxyType

TITLES: Mapping[str, str] = MappingProxyType(
    {
        "capacity": "Paging",
        "batching": "Continuous batching",
        "prefix": "Prefix sharing",
        "pressure": "Preemption under memory pressure",
        "chunking": "Chunked prefill",
        "policies": "Scheduling policies",
        "engine": "The real engine",
    }
)
"""The chapters in order, with their titles."""
