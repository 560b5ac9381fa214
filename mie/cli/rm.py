"""Implement ``mie rm``: delete models from the cache of the Hugging Face hub."""

from __future__ import annotations

import argparse

from mie.checkpoint.hub import remove
from mie.cli.declared import Commands, declared
from mie.cli.pull import hub_name
from mie.config.arguments import format_size


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``mie rm`` to the command line."""
    declared(commands, "rm", run)


def run(args: argparse.Namespace) -> int:
    """Delete the models, and return 0.

    Raises:
        ModelError: one is not on this machine. Those before it are deleted.
    """
    for text in args.models:
        name = hub_name(text)
        print(f"deleted {name} ({format_size(remove(name))})")
    return 0
