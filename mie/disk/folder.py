"""List and remove the contents of a folder of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mie.base.cache_dir import read_json
from mie.disk.segment import SUFFIX, Damaged, Entry, read_index
from mie.disk.store import IDENTITY


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """The blocks of one identity."""

    path: Path
    facts: dict[str, Any]
    """The fields of the identity, and the name of the model."""
    num_bytes: int
    last_used: float
    """Seconds since the epoch when a block was last written or read."""
    damaged: tuple[str, ...]
    """The segments that cannot be used, each with the reason."""
    entries: dict[bytes, Entry]

    @property
    def model(self) -> str:
        """The name of the model."""
        return str(self.facts.get("model", ""))

    @property
    def blocks(self) -> list[Entry]:
        """The blocks of paths, without windows and states."""
        return [entry for entry in self.entries.values() if entry.part == "block"]

    @property
    def roots(self) -> list[bytes]:
        """The keys of the empty paths, one for each salt."""
        return sorted({entry.parent for entry in self.blocks if entry.position == 0})

    @property
    def paths(self) -> list[list[Entry]]:
        """The longest paths from a root, each as the places of its blocks.

        A block is on no path if a block before it has been removed.
        """
        blocks = {entry.key: entry for entry in self.blocks}
        inner = {entry.parent for entry in blocks.values()}
        paths = [self.path_to(key) for key in blocks if key not in inner]
        return [path for path in paths if path[0].position == 0]

    def path_to(self, key: bytes) -> list[Entry]:
        """Return the places of the blocks from the first known one to the block of a key."""
        path: list[Entry] = []
        while key in self.entries:
            path.append(self.entries[key])
            key = path[-1].parent
        return path[::-1]


def shelves(folder: Path) -> Iterator[Shelf]:
    """Yield the contents of a folder, the least recently used first.

    Raises:
        OSError: the folder cannot be read.
    """
    found = [shelf for path in folder.iterdir() if path.is_dir() and (shelf := read_shelf(path))]
    yield from sorted(found, key=lambda shelf: shelf.last_used)


def read_shelf(path: Path) -> Shelf | None:
    """Return the blocks of one identity, or None if the folder is something else."""
    facts = read_json(path / IDENTITY)
    if not isinstance(facts, dict):
        return None
    entries: dict[bytes, Entry] = {}
    damaged, sizes, times = [], [0], [0.0]
    for segment in sorted(path.glob(f"*{SUFFIX}")):
        try:
            about = segment.stat()
            entries.update({entry.key: entry for entry in read_index(segment)})
        except (OSError, Damaged) as error:
            damaged.append(f"{segment.name}: {error}")
            continue
        sizes.append(about.st_size)
        times.append(about.st_mtime)
    return Shelf(
        path=path,
        facts=facts,
        num_bytes=sum(sizes),
        last_used=max(times),
        damaged=tuple(damaged),
        entries=entries,
    )


def remove_shelf(shelf: Shelf) -> int:
    """Remove the blocks of an identity, and return the number of bytes."""
    for path in [*shelf.path.glob(f"*{SUFFIX}"), shelf.path / IDENTITY]:
        path.unlink(missing_ok=True)
    with suppress(OSError):  # a process is writing to it
        shelf.path.rmdir()
    return shelf.num_bytes
