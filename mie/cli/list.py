"""Implement ``mie list``: the models on this machine."""

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from mie.checkpoint.hub import cache_folder, cached_models
from mie.checkpoint.locate import BUNDLED, BUNDLED_DIRECTORY
from mie.config.arguments import format_size


def run(args: argparse.Namespace) -> int:
    """Print a line for each model, and return 0."""
    rows = list(_rows())
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        used = row["last_used"]
        day = time.strftime("%Y-%m-%d", time.localtime(used)) if used else "comes with mie"
        print(f"{row['name']:<{width}}  {format_size(row['bytes']):>10}  {day}")
    if len(rows) == 1:
        print(f"(mie pull NAME fetches others to {cache_folder()})")
    return 0


def _rows() -> Iterator[dict[str, Any]]:
    size = sum(path.stat().st_size for path in BUNDLED_DIRECTORY.glob("*"))
    yield {"name": BUNDLED, "bytes": size, "last_used": None}
    for model in cached_models():
        for name in model.names:
            tag = name.removeprefix(model.repo).removeprefix(":") or None
            bytes_ = model.size(model.choose(tag))
            yield {"name": name, "bytes": bytes_, "last_used": model.last_used}
