"""Name the panels of a model by all that decides them, so that later loads find them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from mie.load.backends import ChosenBackend
from mie.load.opened import OpenedModel
from mie.load.settings import LoadSettings

_SOURCES = (
    *("checkpoint/**/*.py", "checkpoint/**/*.json", "model/**/*.py", "ops/weights/*.py"),
    *("load/opened.py", "load/panels.py", "ops_jit/kept_panels.py", "ops_jit/layout.py"),
    "ops_jit/memory.py",
)
"""The sources that decide which bytes the panels of a file have."""


def keep_panels(opened: OpenedModel, chosen: ChosenBackend, settings: LoadSettings) -> None:
    """Make the jit backend map the panels of an earlier load, or keep the panels that it packs.

    Raises:
        WeightsError: the weights cannot be read.
    """
    if chosen.backend.name != "jit" or settings.load_format == "dummy" or opened.share is not None:
        return
    from mie.ops_jit.jit_backend import JitBackend
    from mie.ops_jit.kept_panels import MIN_BYTES, KeptPanels

    if isinstance(chosen.backend, JitBackend) and opened.weights.nbytes >= MIN_BYTES // 2:
        chosen.backend.kept_panels = KeptPanels(_name(opened, chosen, settings), MIN_BYTES)


def _name(opened: OpenedModel, chosen: ChosenBackend, settings: LoadSettings) -> str:
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(source.read_bytes())
    of_weights = opened.weights.identity(), sorted(opened.forms.items()), opened.config
    of_settings = settings.engine.weight_dtype, settings.engine.activations, settings.head_dtype
    digest.update(repr((*of_weights, *of_settings, chosen.kept_dtype)).encode())
    return digest.hexdigest()[:40]


def _sources() -> Iterator[Path]:
    folder = Path(__file__).parent.parent
    for pattern in _SOURCES:
        yield from sorted(folder.glob(pattern))
