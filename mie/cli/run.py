"""Implement ``mie run``: talk with a model of the hub. It is fetched if the user agrees."""

import argparse
import os
import sys
from functools import partial

from mie.checkpoint.hub import HubName, ask_hub, find_cached
from mie.checkpoint.locate import BUNDLED
from mie.cli import chat
from mie.cli.parser import Commands, declared
from mie.cli.pull import pull, summary
from mie.errors import ModelError


def add_parser(commands: Commands) -> None:
    """Add ``mie run`` to the command line."""
    talk = partial(chat.add_options, names_model=False)
    parser = declared(commands, "run", run, conversation=talk)
    parser.set_defaults(model=BUNDLED)


def run(args: argparse.Namespace) -> int:
    """Fetch the model if that is needed and wanted, then do as ``mie chat``."""
    args.title = name = args.positional_model
    if args.prompt_words:
        args.prompt = " ".join(args.prompt_words)
    editor = chat.editor_of(args)  # a missing extra is named before a model is fetched
    args.positional_model = _path_of(name, args.pull)
    return chat.talk(args, editor)


def _path_of(text: str, may_pull: bool) -> str:
    name = HubName.parse(text)
    if text == BUNDLED or name is None or os.path.exists(text):
        return text
    if found := find_cached(name):
        return str(found)
    if not may_pull and not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        raise ModelError(
            f"{name} is not on this machine; fetch it with mie pull {name}, or add --pull"
        )
    if not may_pull:
        model = ask_hub(name.repo)
        what = summary(model, model.choose(name.tag))
        question = f"{name} is not on this machine. Fetch {what}? [Y/n] "
        print(question, end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("", "y", "yes"):
            raise ModelError(f"{name} was not fetched, so there is nothing to talk with")
    return str(pull(name))
