"""Read the traces of Azure's language models of 2023 (github.com/Azure/AzurePublicDataset)."""

from __future__ import annotations

import csv
import datetime
import lzma
from itertools import islice
from pathlib import Path
from typing import NamedTuple

SECOND = 1_000_000_000


class Arrival(NamedTuple):
    """A request of a trace."""

    time_ns: int
    """Nanoseconds since the first request of the trace."""
    num_prompt: int
    num_answer: int


def read_azure(path: Path, most: int | None = None) -> list[Arrival]:
    """Return the first ``most`` requests of a file of comma-separated values, or of its .xz."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(islice(csv.DictReader(file), most))
    times = [datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        Arrival(
            time_ns=round((time - times[0]).total_seconds() * SECOND),
            num_prompt=int(row["ContextTokens"]),
            num_answer=int(row["GeneratedTokens"]),
        )
        for time, row in zip(times, rows, strict=True)
    ]
