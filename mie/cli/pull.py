"""Implement ``mie pull``: fetch a model from the Hugging Face hub, if this machine can run it."""

import argparse
import re
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from mie.base.reprs import count
from mie.base.resources import available_bytes
from mie.checkpoint.config import load_model_config
from mie.checkpoint.gguf.header import BLOCKS
from mie.checkpoint.hub import HubModel, HubName, ask_hub, cache_folder, cached_models, download
from mie.config.arguments import format_size
from mie.errors import (
    ConfigError,
    ModelError,
    TooLittleMemoryError,
    UnsupportedModelError,
    printable,
)

ROOM = 0.9
"""The part of the available memory that the weights of a file may fill.

A context and the results of a step need the rest.
"""


def run(args: argparse.Namespace) -> int:
    """Fetch the model, and return 0."""
    name = hub_name(args.model)
    pull(name, force=args.force)
    print(f"{name} is ready: mie run {name}")
    return 0


def hub_name(text: str) -> HubName:
    """Return the parts of a hub id that a user gives.

    Raises:
        ModelError: it is not an id.
    """
    name = HubName.parse(text)
    if name is None:
        raise ModelError(
            f"{text!r} is not a name on the hub; write OWNER/MODEL or OWNER/MODEL:TAG, such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return name


def pull(name: HubName, *, force: bool = False) -> Path:
    """Fetch the model with progress on standard error, and return the path that loads it.

    Raises:
        ConfigError: it does not fit the memory or the disk, and ``force`` is not set.
        ModelError: the hub does not give it, or mie cannot run it.
    """
    model = ask_hub(name.repo)
    chosen = model.choose(name.tag)
    if not force:
        try:
            check_runs(model, chosen)
        except (TooLittleMemoryError, UnsupportedModelError) as error:
            raise type(error)(f"{model.repo} was not downloaded: {error}") from error
        _check_disk(model, chosen)
    return download(model, chosen, _tell)


def check_runs(model: HubModel, chosen: Collection[str]) -> None:
    """Refuse files that this machine cannot run, by their sizes and by config.json.

    Raises:
        TooLittleMemoryError: they do not fit the memory. The message names what does.
        ModelError: the architecture or a feature is not supported.
    """
    if any(name.endswith(".gguf") for name in chosen):
        unread = [tag for tag, files in model.tags.items() if files == chosen and not is_read(tag)]
        if unread:
            known = [tag for tag in model.tags if is_read(tag)]
            raise UnsupportedModelError(
                f"quantisation {unread[0]} is not supported; of this repository are "
                f"{', '.join(known) or 'none'}"
            )
        _check_size(model, chosen)
    else:
        _check_directory(model, chosen)


def is_read(tag: str) -> bool:
    """Return whether mie reads the blocks of this quantisation, "Q4_K" in "UD-Q4_K_XL"."""
    kind = re.sub("^(UD-)?(FP(?=[13]))?", lambda found: "F" if found[2] else "", tag)
    return kind.startswith(tuple(BLOCKS))


def _check_size(model: HubModel, chosen: Collection[str]) -> None:
    """Refuse quantised weights, because they are kept as they are in the files."""
    if fits(model.size(chosen)):
        return
    tags = {tag: files for tag, files in model.tags.items() if is_read(tag)}
    fitting = {tag: files for tag, files in tags.items() if fits(model.size(files))}
    best = max(fitting, key=lambda tag: model.size(fitting[tag]), default=None)
    what = "no quantisation of it fits"
    if best is not None:
        what = f"{model.repo}:{best} has {format_size(model.size(fitting[best]))}, which fits"
    raise TooLittleMemoryError(
        f"{summary(model, chosen)} do not fit the memory, of which "
        f"{format_size(available_bytes())} are available ({what}; --force downloads it anyway)"
    )


def fits(num_bytes: int) -> bool:
    """Return whether weights of this size fit the memory beside a context."""
    return num_bytes <= ROOM * available_bytes()


def _check_directory(model: HubModel, chosen: Collection[str]) -> None:
    from mie.load.fit import check_fits

    config = load_model_config(download(model, ["config.json"]))
    if config.quantisation is not None:
        _check_size(model, chosen)
        return
    try:
        check_fits(config)
    except TooLittleMemoryError as error:
        raise TooLittleMemoryError(
            f"{error}\n(a GGUF repository of the model has smaller quantisations; --force "
            "downloads it anyway)"
        ) from error


def _check_disk(model: HubModel, chosen: Collection[str]) -> None:
    here = {name for each in cached_models() if each.repo == model.repo for name in each.files}
    missing = model.size([name for name in chosen if name not in here])
    folder = cache_folder()
    free = shutil.disk_usage(next(x for x in (folder, *folder.parents) if x.exists())).free
    if missing > free:
        raise ConfigError(
            f"{model.repo} was not downloaded: it needs {format_size(missing)}, and the disk of "
            f"{folder} has {format_size(free)} free (`mie rm` deletes models; HF_HOME names "
            "another disk)"
        )


def _tell(name: str, size: int, here: int) -> None:
    goes_on = f", of which {format_size(here)} are here" if here else ""
    print(f"{printable(Path(name).name)}: {format_size(size)}{goes_on}", file=sys.stderr)


def summary(model: HubModel, chosen: Collection[str]) -> str:
    """Return the number and the size of the files."""
    return f"{count(len(chosen), 'file')} of {format_size(model.size(chosen))}"
