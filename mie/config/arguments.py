"""Add command-line options for the settings of a dataclass, and read them back."""

import argparse
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from decimal import Decimal
from typing import Any

from mie.base.refusals import NEUTRAL
from mie.config.settings import Setting, settings_of
from mie.errors import ConfigError

_METAVARS = {
    "integer": "N",
    "size": "SIZE",
    "number": "X",
    "choice": "NAME",
    "text": "NAME",
    "mapping": "JSON",
    "list": "NAME=PATH",
}

_UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


_MULTIPLES: Mapping[str, int] = {
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_COUNT = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kmgtKMGT])", re.ASCII)


def add_settings(parser: argparse.ArgumentParser, cls: type, omit: Collection[str] = ()) -> None:
    """Add an option for each setting of ``cls`` except for ``omit``, grouped by section.

    The namespace has None for an option that is not given.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    aliases = {each.alias_of: name for name, _, each in settings_of(cls) if each.alias_of}
    for name, default, declared in settings_of(cls):
        if name in omit or declared.alias_of or declared.kind == "object":
            continue
        if declared.section not in groups:
            groups[declared.section] = parser.add_argument_group(declared.section)
        names = [name, aliases[name]] if name in aliases else [name]
        groups[declared.section].add_argument(
            *map(option, names), dest=name, default=None, **_argparse_keywords(default, declared)
        )


def add_neutral_names(
    parser: argparse.ArgumentParser, cls: type, omit: Collection[str] = ()
) -> None:
    """Add a hidden option for each of vLLM's arguments that have no effect."""
    for name, neutral in NEUTRAL.get(cls.__name__, {}).items():
        if name not in omit:
            keywords: dict[str, Any] = {"type": _json_or_text}
            if isinstance(neutral.values[0], bool):
                keywords = {"action": argparse.BooleanOptionalAction}
            parser.add_argument(option(name), default=None, help=argparse.SUPPRESS, **keywords)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def given(args: argparse.Namespace, cls: type, omit: Collection[str] = ()) -> dict[str, Any]:
    """Return the given options by field name of ``cls``, except for ``omit``."""
    objects = [name for name, _, declared in settings_of(cls) if declared.kind == "object"]
    names = [*(each.name for each in fields(cls)), *NEUTRAL.get(cls.__name__, {})]
    values = {name: getattr(args, name, None) for name in names if name not in (*omit, *objects)}
    return {name: value for name, value in values.items() if value is not None}


def option(name: str) -> str:
    """Return the command-line spelling of a setting."""
    return "--" + name.replace("_", "-")


def describe(default: object, declared: Setting) -> str:
    """Return the help text of a setting with its choices and default."""
    notes = []
    if declared.choices and declared.kind == "choice":
        notes.append(", ".join(declared.choices))
    if declared.kind == "size":
        notes.append("such as 512MiB")
    if declared.default_text:
        notes.append(f"default: {declared.default_text}")
    elif default is not None:
        shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
        notes.append(f"default: {shown}")
    return f"{declared.help} ({'; '.join(notes)})" if notes else declared.help


def _argparse_keywords(default: object, declared: Setting) -> dict[str, Any]:
    help_text = describe(default, declared).replace("%", "%%")
    if declared.kind == "switch":
        return {"action": argparse.BooleanOptionalAction, "help": help_text}
    types = {
        "integer": integer_argument,
        "size": size_argument,
        "number": float,
        "mapping": json_object,
    }
    several = {"nargs": "+"} if declared.kind == "list" else {}
    return {
        **several,
        "type": types.get(declared.kind, str),
        "metavar": _METAVARS[declared.kind],
        "help": help_text,
    }


def integer_argument(text: str) -> int:
    """Return the integer that an argument is, for argparse, with vLLM's units.

    The letters k, m, g and t are powers of 1,000, and K, M, G and T are powers of 1,024 and take
    no decimals: ``"25.6k"`` is 25,600, and ``"4K"`` is 4,096.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        try:
            return int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not an integer such as 4096, 4k (4,000) or 4K (4,096)"
            ) from None
    value = Decimal(match[1]) * _MULTIPLES[match[2]]
    if value != int(value) or ("." in match[1] and match[2].isupper()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number; K, M, G and T (powers of 1,024) take no decimals"
        )
    return int(value)


def json_object(text: str) -> dict[str, Any]:
    """Return the object that an argument is, for argparse."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


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
