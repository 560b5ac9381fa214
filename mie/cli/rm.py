"""Implement ``mie rm``: delete models from the cache of the Hugging Face hub."""

from __future__ import annotations

import argparse

from mie.checkpoint.hub import remove
from mie.cli.pull import hub_name
from mie.config.arguments import format_size


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add ``mie rm`` to the command line. Its parser sets ``run``."""
    parser = subparsers.add_parser(
        "rm",
        help="delete models from this machine",
        description="Delete models from the cache, which other programs share.",
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="NAME[:TAG]",
        help="a name that mie list shows; without a TAG, all files of that repository",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Delete the models, and return 0.

    Raises:
        ModelError: one is not on this machine. Those before it are deleted.
    """
    for text in args.models:
        name = hub_name(text)
        print(f"deleted {name} ({format_size(remove(name))})")
    return 0
