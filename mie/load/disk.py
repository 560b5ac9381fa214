"""Open the prefix cache on a disk for an engine that is loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mie.base.cache_dir import CacheError, open_cache, read_json, write_json
from mie.base.files import digest_of
from mie.base.version import __version__
from mie.config.engine import EngineConfig
from mie.disk.identity import Identity
from mie.disk.store import BlockStore
from mie.disk.tier import DiskTier, Store
from mie.errors import ConfigError
from mie.load.opened import OpenedModel
from mie.load.sizing import MemoryPlan
from mie.memory.table import Emit
from mie.ops.backend import Backend

logger = logging.getLogger(__name__)


NewStore = Callable[[Identity], Store]


def disk_tier(
    opened: OpenedModel, backend: Backend, plan: MemoryPlan, new_store: NewStore | None
) -> DiskTier | None:
    """Return the tier that ``prefix_cache_dir`` names, or None without one.

    ``new_store`` returns another store than the folder.

    Raises:
        ConfigError: the folder cannot be used.
    """
    config = plan.config
    if new_store is not None:
        return DiskTier(new_store(identity_of(opened, backend, plan)))
    if config.prefix_cache_dir is None:
        if config.prefix_cache_disk != EngineConfig.prefix_cache_disk:
            raise ConfigError(
                f"prefix_cache_disk is {config.prefix_cache_disk} without prefix_cache_dir (name "
                "the folder too, or leave it out)"
            )
        return None
    if not plan.num_host_blocks:
        raise ConfigError(
            "prefix_cache_dir needs host memory for one block at least (end other programs, or "
            "lower num_blocks)"
        )
    model = {
        "model": str(opened.weights.paths[0]),
        "num_layers": plan.layout.num_layers,
        "blocks_per_window": plan.layout.num_groups - 1,
    }
    identity = identity_of(opened, backend, plan)
    folder = Path(config.prefix_cache_dir).expanduser()
    try:
        store = BlockStore(folder, identity, max_bytes=config.prefix_cache_disk, model=model)
    except (CacheError, OSError) as error:
        raise ConfigError(f"prefix_cache_dir cannot be used: {error}") from None
    return DiskTier(store)


def identity_of(opened: OpenedModel, backend: Backend, plan: MemoryPlan) -> Identity:
    """Return everything that the bytes of a model's blocks depend on."""
    weights = [_digest_of(path, plan.config.seed) for path in opened.weights.paths]
    forms = sorted((name, repr(form)) for name, form in opened.forms.items())
    model = json.dumps([weights, forms, repr(opened.config)])
    ranks = f", {plan.num_ranks} ranks" if plan.num_ranks > 1 else ""
    numerics: dict[str, Any] = {**backend.numerics(), "mie": __version__}
    return Identity(
        weights=blake2b(model.encode(), digest_size=16).hexdigest(),
        numerics=json.dumps(numerics, sort_keys=True),
        cache_dtype=plan.config.kv_cache_dtype,
        activations=plan.config.activations,
        block_size=plan.config.block_size,
        block_bytes=plan.num_ranks * plan.block_bytes,
        parts=f"{plan.window}, state of {plan.state_bytes} bytes{ranks}",
    )


def _digest_of(path: Path, seed: int) -> str:
    """Return the digest of a file of weights. It is kept until the file changes."""
    if not path.is_file():
        return f"random weights of seed {seed}"
    about = path.stat()
    facts = [str(path.resolve()), about.st_size, about.st_mtime_ns, about.st_ino]
    name = blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
    computed = partial(digest_of, path, blake2b(digest_size=16))
    try:
        kept = open_cache("digests") / f"{name}.json"
    except CacheError as error:
        logger.warning("the digest of %s is computed each time: %s", path, error)
        return computed()
    digest = read_json(kept)
    if not isinstance(digest, str):
        digest = computed()
        write_json(kept, digest)
    return digest


def both(first: Emit, second: Emit) -> Emit:
    """Return a function that passes each record to two others."""

    def emit(record: tuple[Any, ...]) -> None:
        first(record)
        second(record)

    return emit
