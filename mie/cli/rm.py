"""Implement ``mie rm``: delete models from the cache of the Hugging Face hub."""

import argparse

from mie.checkpoint.hub import remove
from mie.cli.pull import hub_name
from mie.config.arguments import format_size


def run(args: argparse.Namespace) -> int:
    """Delete the models, and return 0."""
    for text in args.models:
        name = hub_name(text)
        print(f"deleted {name} ({format_size(remove(name))})")
    return 0
