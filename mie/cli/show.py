"""Implement ``mie show``: a model on this machine, or on the hub before it is fetched."""

import argparse
import os
from collections.abc import Iterator

from mie.base.resources import available_bytes
from mie.checkpoint.hub import HubModel, HubName, ask_hub, find_cached
from mie.cli.inspect import inspect_model, print_facts, show
from mie.cli.pull import check_runs, fits, is_read, summary
from mie.config.arguments import format_size
from mie.errors import MieError


def run(args: argparse.Namespace) -> int:
    """Print the facts, and return 0, or 1 if mie cannot run the model."""
    name = None if os.path.exists(args.model) else HubName.parse(args.model)
    path = name and find_cached(name)
    if name is None or path is not None:
        if name is not None:
            print_facts([("name", str(name))])
        return show(inspect_model(str(path or args.model)))
    model = ask_hub(name.repo)
    print_facts(_facts(model))
    try:
        check_runs(model, model.choose(name.tag))
    except MieError as error:
        print_facts([("problem", str(error))])
        return 1
    return 0


def _facts(model: HubModel) -> Iterator[tuple[str, str]]:
    yield "model", f"{model.repo}, not on this machine"
    directory = model.directory_files()
    if model.is_complete(directory):
        yield "safetensors", summary(model, directory)
    key = "quantisations"
    for tag, files in model.tags.items():
        size = model.size(files)
        verdict = "fits" if fits(size) else "does not fit"
        verdict = verdict if is_read(tag) else "is not supported"
        yield key, f"{tag:<12} {format_size(size):>10}  {verdict}"
        key = ""
    yield "memory", f"{format_size(available_bytes())} available"
