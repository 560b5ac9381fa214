"""Parse and format sizes in bytes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from decimal import Decimal

from mie.errors import ConfigError

_UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Return the bytes of a size: ``"512MiB"``, ``"2GB"``, ``"1.5 GiB"`` or ``"4096"``.

    KiB, MiB, GiB and TiB are powers of 1,024, and kB, MB, GB and TB are powers of 1,000. Case does
    not matter, and a fraction of a byte is dropped.

    Raises:
        ConfigError: the text is not a positive size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    if match is None or unit not in _UNITS:
        raise ConfigError(
            f"size {text!r} is not understood; write bytes, or a number with one of kB, MB, GB, "
            "TB, KiB, MiB, GiB, TiB, such as 512MiB"
        )
    size = int(Decimal(match[1]) * _UNITS[unit])
    if size < 1:
        raise ConfigError(f"size {text!r} must be at least one byte")
    return size


def format_size(num_bytes: int) -> str:
    """Return the size in the largest fitting binary unit: ``"1.5 MiB"``, ``"17 bytes"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= _UNITS[unit.lower()]:
            return f"{num_bytes / _UNITS[unit.lower()]:.1f} {unit}"
    return f"{num_bytes} bytes"


def size_argument(text: str) -> int:
    """Parse a size as the ``type`` of an argparse argument, and keep the error message."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
