"""Collect the results in two files. Both are written after every row."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.page import as_markdown


@dataclass(kw_only=True)
class BenchReport:
    """All results so far, written to a file after every change."""

    state: dict[str, Any]
    prefix: Path | None
    is_dry_run: bool
    ceilings: dict[str, float] = field(default_factory=dict)
    decode: list[dict[str, Any]] = field(default_factory=list)
    prefill: list[dict[str, Any]] = field(default_factory=list)
    end_to_end: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def save(self) -> None:
        """Write PREFIX.json and PREFIX.md with the results so far."""
        if self.prefix is None:
            return
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        values = {key: value for key, value in asdict(self).items() if key != "prefix"}
        Path(f"{self.prefix}.json").write_text(json.dumps(values, indent=2) + "\n")
        Path(f"{self.prefix}.md").write_text(as_markdown(values))

    def skip(self, name: str, reason: str) -> None:
        """Add a part that was not measured, by name."""
        if {"name": name, "reason": reason} in self.skipped:
            return
        self.skipped.append({"name": name, "reason": reason})
        print(f"skipped: {name}: {reason}", flush=True)
        self.save()

    def fail(self, what: str) -> None:
        """Add a failure, by name."""
        self.failures.append(what)
        print(f"failed: {what}", flush=True)
        self.save()
