"""The book of benchmarks: what each mechanism buys. A module each, and its result is plain data.

This room knows the simulator; in `engine` alone the real engine, in `plots` alone matplotlib, in
`peer` alone torch and transformers.
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
"""The chapters in order, and what each is about."""
