"""Compute the blocks of a prefix cache on a disk again, and compare every bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from mie.checkpoint.locate import locate_model
from mie.config.engine_args import EngineArgs
from mie.config.params.sampling import SamplingParams
from mie.disk.folder import Shelf
from mie.disk.identity import Identity
from mie.disk.segment import Block, Damaged, Entry, read_block
from mie.disk.store import DiskStats
from mie.errors import ConfigError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A block that differs from its computation."""

    part: str
    position: int
    """Position of the first token of the block."""
    layer: int | None
    """The layer of the first byte that differs, or None for a state or a window."""
    byte: int
    num_bytes: int
    """Number of bytes that differ."""


@dataclass
class Verdict:
    """The result of a check."""

    num_equal: int = 0
    num_left: int = 0
    """Number of contents that were not computed, such as states at other places."""
    num_damaged: int = 0
    """Number of contents that a checksum refuses. An engine does not use them."""
    differences: list[Difference] = field(default_factory=list)


class _Roots:
    """Names roots by their keys, because the salts of a store are not known."""

    def root(self, salt: str | None) -> bytes:
        return bytes.fromhex(salt or "")


class _Check:
    """Takes the contents of an engine as a store does, and compares them with a store's."""

    is_writing = True

    def __init__(self, shelf: Shelf, chosen: set[bytes]) -> None:
        self.identity, self.stats, self.verdict = _Roots(), DiskStats(), Verdict()
        self.left = set(chosen)
        self._shelf = shelf

    def has(self, key: bytes) -> bool:
        return key not in self.left

    def has_written(self, key: bytes) -> bool:
        return False

    def size_of(self, key: bytes) -> int:
        return 0

    def find(self, token_ids: Sequence[int], salt: str | None, limit: int) -> list[bytes]:
        return []

    def read(self, key: bytes) -> bytes | None:
        return None

    def close(self) -> None:
        pass

    def write(self, block: Block) -> None:
        self.left.discard(block.key)
        entry = self._shelf.entries[block.key]
        try:
            stored = read_block(entry)
        except (OSError, Damaged):
            self.verdict.num_damaged += 1
            return
        if stored == block.data:
            self.verdict.num_equal += 1
        else:
            self.verdict.differences.append(self._difference(entry, stored, block.data))

    def _difference(self, entry: Entry, stored: bytes, computed: bytes) -> Difference:
        different = [i for i, (a, b) in enumerate(zip(stored, computed, strict=True)) if a != b]
        num_layers, layer = self._shelf.facts.get("num_layers"), None
        if entry.part == "block" and num_layers is not None:
            layer = different[0] * num_layers // len(stored)
        return Difference(
            part=entry.part,
            position=entry.position,
            layer=layer,
            byte=different[0],
            num_bytes=len(different),
        )


def check(shelf: Shelf, args: EngineArgs, fraction: float = 1.0, seed: int = 0) -> Verdict:
    """Compute a random ``fraction`` of the paths of a store again, and compare their contents.

    Raises:
        ConfigError: the blocks belong to another model, or to other settings.
    """
    paths = shelf.paths
    count = max(1, round(len(paths) * fraction))
    chosen = random.Random(seed).sample(paths, min(count, len(paths)))
    nodes = {(entry.parent, entry.token_ids) for path in chosen for entry in path}
    keys = {key for key, each in shelf.entries.items() if (each.parent, each.token_ids) in nodes}
    checks: list[_Check] = []

    def new_store(identity: Identity) -> _Check:
        _check_identity(shelf, identity)
        checks.append(_Check(shelf, keys))
        return checks[0]

    block_size = shelf.facts.get("block_size", args.block_size)
    settings = LoadSettings.of(replace(args, block_size=block_size))
    directory = locate_model(args.model)
    engine = load_engine(directory, settings, use_tqdm=False, new_store=new_store)
    for path in chosen:
        token_ids = [token_id for entry in path for token_id in entry.token_ids]
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        fitting = token_ids[: engine.max_model_len - 1]
        engine.add_request(fitting, params, cache_salt=path[0].parent.hex())
        while engine.has_work:
            engine.step()
    checks[0].verdict.num_left = len(checks[0].left)
    return checks[0].verdict


def _check_identity(shelf: Shelf, identity: Identity) -> None:
    """Raise `ConfigError` unless the blocks of a store have this identity."""
    if identity.digest == shelf.path.name:
        return
    facts = asdict(identity)
    differing = [
        f"{name} is {shelf.facts.get(name)}, not {facts[name]}"
        for name in facts
        if shelf.facts.get(name) != facts[name]
    ]
    raise ConfigError(
        f"the blocks in {shelf.path} are not of this model with these settings: "
        f"{'; '.join(differing)} (give the settings with which they were written)"
    )
