"""Implement ``mie cache``: the prefix cache on a disk."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mie.base.reprs import count
from mie.cli.parser import Commands, declared
from mie.config.arguments import add_settings, format_size, given
from mie.config.engine_args import EngineArgs
from mie.disk.folder import Shelf, remove_shelf, shelves
from mie.errors import ConfigError, MieError, printable
from mie.text.tokenizer import Tokenizer

NUM_WORDS = 24
"""Number of tokens of the beginning of a path that are shown."""


def add_parser(commands: Commands) -> None:
    """Add ``mie cache`` to the command line."""
    runs = {"list": _list, "du": _du, "verify": _verify, "rm": _rm}
    declared(commands, "cache", runs, settings=partial(add_settings, cls=EngineArgs))


def _shelves(args: argparse.Namespace) -> list[Shelf]:
    """Return the contents of the folder, perhaps of one identity."""
    folder = Path(args.folder).expanduser()
    try:
        found = [*shelves(folder)]
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
    wanted = getattr(args, "name", None)
    if wanted is None:
        return found
    chosen = [shelf for shelf in found if shelf.path.name.startswith(wanted)]
    if len(chosen) != 1:
        known = ", ".join(shelf.path.name[:8] for shelf in found) or "none"
        raise ConfigError(f"{len(chosen)} names begin with {wanted!r}; known are: {known}")
    return chosen


def _list(args: argparse.Namespace) -> int:
    """Print the models, salts, tokens and sizes, and how each path begins."""
    rows = [_row(shelf) for shelf in _shelves(args)]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["last_used"]))
        print(
            f"{row['name'][:8]}  {row['model']}  {count(row['tokens'], 'token')}, "
            f"{count(row['salts'], 'salt')}, "
            f"{format_size(row['bytes'])}, used {used}"
        )
        for text in row["beginnings"]:
            print(f"          {text}")
        for reason in row["damaged"]:
            print(f"          damaged: {printable(reason)}")
    return 0


def _row(shelf: Shelf) -> dict[str, Any]:
    return {
        "name": shelf.path.name,
        "model": shelf.model,
        "numerics": shelf.facts.get("numerics"),
        "salts": len(shelf.roots),
        "tokens": sum(len(entry.token_ids) for entry in shelf.blocks),
        "bytes": shelf.num_bytes,
        "last_used": shelf.last_used,
        "beginnings": [*_beginnings(shelf)],
        "damaged": shelf.damaged,
    }


def _beginnings(shelf: Shelf) -> Iterator[str]:
    """Yield how the paths begin: as text, or as token ids if the tokenizer is not there."""
    try:
        tokenizer = Tokenizer.load(Path(_model(shelf)), None)
    except (MieError, OSError):
        tokenizer = None
    starts = {
        tuple(token_id for entry in path for token_id in entry.token_ids)[:NUM_WORDS]: None
        for path in shelf.paths
    }
    for start in starts:
        yield printable(tokenizer.decode([*start])) if tokenizer else " ".join(map(str, start))


def _model(shelf: Shelf) -> str:
    """Return the GGUF file or the directory with the model."""
    path = Path(shelf.model)
    return str(path if path.suffix == ".gguf" else path.parent)


def _du(args: argparse.Namespace) -> int:
    """Print the size of each identity, and of all."""
    found = _shelves(args)
    for shelf in found:
        print(f"{format_size(shelf.num_bytes):>10}  {shelf.path.name[:8]}  {shelf.model}")
    print(f"{format_size(sum(shelf.num_bytes for shelf in found)):>10}  in all")
    return 0


def _rm(args: argparse.Namespace) -> int:
    """Remove the blocks of an identity, or all."""
    if args.name is None and not args.all:
        raise ConfigError("mie cache rm needs a name that mie cache list shows, or --all")
    for shelf in _shelves(args):
        print(f"removed {shelf.path.name[:8]} ({format_size(remove_shelf(shelf))})")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Compute blocks again, and return 1 if one differs."""
    from mie.lab.cache_check import check

    settings = given(args, EngineArgs)
    code = 0
    for shelf in _shelves(args):
        verdict = check(
            shelf, EngineArgs(**settings, model=args.model or _model(shelf)), args.fraction
        )
        print(
            f"{shelf.path.name[:8]}  {verdict.num_equal:,} contents are equal, "
            f"{len(verdict.differences):,} differ, {verdict.num_damaged:,} are damaged, "
            f"{verdict.num_left:,} were not computed"
        )
        for each in verdict.differences:
            layer = "" if each.layer is None else f", layer {each.layer}"
            print(
                f"          {shelf.model}: {each.part} at position {each.position}{layer}: "
                f"{each.num_bytes:,} bytes differ, first byte {each.byte:,}"
            )
        code = code or int(bool(verdict.differences))
    return code
