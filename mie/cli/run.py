"""Implement ``mie run``: talk with a model of the hub, which is fetched if the user agrees."""

from __future__ import annotations

import argparse
import os
import sys

from mie.checkpoint.hub import HubName, ask_hub, find_cached
from mie.checkpoint.locate import BUNDLED
from mie.cli import chat
from mie.cli.pull import pull, summary
from mie.errors import ModelError


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add ``mie run`` to the command line. Its parser sets ``run``."""
    parser = subparsers.add_parser(
        "run",
        help="talk with a model of the hub, and fetch it first",
        description="Talk with a model by its name. Without the network if it is on this machine.",
    )
    parser.add_argument("positional_model", metavar="NAME[:TAG]", help="a hub id or a path")
    parser.add_argument("prompt_words", nargs="*", metavar="PROMPT", help="same as --prompt")
    parser.add_argument("--pull", action="store_true", help="fetch a missing model unasked")
    chat.add_options(parser, names_model=False)
    parser.set_defaults(run=run, model=BUNDLED)
    return parser


def run(args: argparse.Namespace) -> int:
    """Fetch the model if that is needed and wanted, then do as ``mie chat``.

    Raises:
        ConfigError: the model does not fit this machine.
        ModelError: the model is not here and may not be fetched, or cannot be used.
    """
    args.title = name = args.positional_model
    args.positional_model = _path_of(name, args.pull)
    if args.prompt_words:
        args.prompt = " ".join(args.prompt_words)
    return chat.run(args)


def _path_of(text: str, may_pull: bool) -> str:
    name = HubName.parse(text)
    if text == BUNDLED or name is None or os.path.exists(text):
        return text
    if found := find_cached(name):
        return str(found)
    if not may_pull and not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise ModelError(
            f"{name} is not on this machine; fetch it with mie pull {name}, or let mie run --pull"
        )
    if not may_pull:
        model = ask_hub(name.repo)
        what = summary(model, model.choose(name.tag))
        question = f"{name} is not on this machine. Fetch {what}? [Y/n] "
        print(question, end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
            raise ModelError(f"{name} was not fetched, so there is nothing to talk with")
    return str(pull(name))
