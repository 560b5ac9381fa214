"""Build parsers from ``commands.json``, which declares the texts and the options of commands.

A row has ``help``, ``description``, the lines of an ``epilog``, and ``arguments``. An argument is
an object of argparse's keywords with its ``names``. A group has a ``group`` as its title, or one of
its arguments may be given (``exclusive``). A name stands for the arguments of another row, or for
a function that adds some.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mie.config.arguments import json_object, size_argument

Commands = argparse._SubParsersAction  # the result of add_subparsers has no public type
Adders = Mapping[str, Callable[[argparse.ArgumentParser], object]]
"""Functions that add arguments, by the names for which they stand."""

KINDS: Mapping[str, Any] = {
    "integer": int,
    "number": float,
    "size": size_argument,
    "json": json_object,
    "switch": argparse.BooleanOptionalAction,
}


_ROWS: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("commands.json").read_text(encoding="utf-8")
)


def declared(
    commands: Commands[argparse.ArgumentParser], name: str, run: Any = None, **adders: Any
) -> argparse.ArgumentParser:
    """Add a command as its row declares it. Its parser sets ``run``.

    ``adders`` are functions that the row names.
    """
    row = _ROWS[name]
    texts = {key: row[key] for key in ("help", "description") if key in row}
    if "epilog" in row:
        texts["epilog"] = "\n".join(row["epilog"])
        texts["formatter_class"] = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name.rpartition(" ")[2], **texts)
    add_declared(parser, name, **adders)
    if run is not None:
        parser.set_defaults(run=run)
    return parser


def add_declared(parser: argparse.ArgumentParser, name: str, **adders: Any) -> None:
    """Add the arguments of a row to a parser."""
    _add(parser, parser, _ROWS[name]["arguments"], adders)


def epilog_of(name: str) -> str:
    """Return the epilog of a row."""
    return "\n".join(_ROWS[name]["epilog"])


def _add(parser: argparse.ArgumentParser, group: Any, arguments: Any, adders: Adders) -> None:
    for each in arguments:
        if isinstance(each, str):
            if each in adders:
                adders[each](parser)
            else:
                _add(parser, group, _ROWS[each]["arguments"], adders)
        elif "group" in each:
            inner = parser.add_argument_group(each["group"], each.get("description"))
            _add(parser, inner, each["arguments"], adders)
        elif "exclusive" in each:
            _add(parser, group.add_mutually_exclusive_group(), each["exclusive"], adders)
        else:
            add_argument(group, each, adders)


def add_argument(group: Any, argument: Mapping[str, Any], adders: Adders | None = None) -> None:
    """Add an argument; ``adders`` may have its type."""
    keywords = {key: value for key, value in argument.items() if key != "names"}
    for key in {"type", "action"} & keywords.keys():
        name = keywords[key]
        keywords[key] = KINDS.get(name) or (adders or {}).get(name, name)
    group.add_argument(*argument["names"].split(), **keywords)


def arguments_of(name: str) -> dict[str, Mapping[str, Any]]:
    """Return the arguments of a row by the names that they have in the namespace."""
    found = {}
    for each in _ROWS[name]["arguments"]:
        word = each["names"].split()[0].removeprefix("--").replace("-", "_")
        found[each.get("dest", word)] = each
    return found
