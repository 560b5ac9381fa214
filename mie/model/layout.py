"""Divide the layers that attend into groups, each with block tables of its own.

A block has memory for the layers of one group. The layers without a window are the first group.
Layers with a window are as many more groups of that size as they need, so that blocks behind a
window can be freed and used for any other group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mie.base.arithmetic import ceil_div
from mie.model.config import ModelConfig


class Place(NamedTuple):
    """Where a layer's keys and values are."""

    group: int
    number: int
    """The layer's number in its group."""


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The places of the layers that attend, in order."""

    places: tuple[Place, ...]
    num_layers: int
    """Layers of a block."""
    num_groups: int = 1
    window: int | None = None
    """The widest window of the groups after the first, or None for a single group."""


def whole(config: ModelConfig) -> CacheLayout:
    """Return the layout with one group, in which no block is freed before its sequence ends."""
    num_layers = config.num_attention_layers
    return CacheLayout(places=tuple(Place(0, i) for i in range(num_layers)), num_layers=num_layers)


def grouped(config: ModelConfig) -> CacheLayout:
    """Return the layout with groups for the layers with a window, if it suits the model.

    Otherwise the layout is `whole`: if all layers have a window or none has, or if the last group
    would lack more than a sixth of all layers. The blocks have memory for those too. This costs
    more than windows save while sequences are short.
    """
    kinds = zip(config.layer_windows, config.layers_recurrent, strict=True)
    windows = [window for window, is_recurrent in kinds if not is_recurrent]
    num_layers, size = len(windows), windows.count(None)
    num_windows = num_layers - size
    num_groups = ceil_div(num_windows, size) if size else 0
    padding = num_groups * size - num_windows
    if not num_groups or padding * 6 > num_layers:
        return whole(config)
    counts, places = [0, 0], []
    for window in windows:
        number = counts[window is not None]
        places.append(
            Place(0, number) if window is None else Place(1 + number // size, number % size)
        )
        counts[window is not None] += 1
    return CacheLayout(
        places=tuple(places),
        num_layers=size,
        num_groups=1 + num_groups,
        window=max(window for window in windows if window is not None),
    )
