"""Find the GGUF models of a folder. A large model has several files."""

import re
from pathlib import Path

from mie.errors import ModelError

_SHARD = re.compile(r"-(\d{5})-of-\d{5}$")
_MOST_NAMED = 8


def gguf_files(folder: Path) -> dict[str, Path]:
    """Return the GGUF models in a folder by name; the first file stands for several."""
    found = {}
    for path in sorted(folder.glob("*.gguf")):
        shard = _SHARD.search(path.stem)
        is_part = path.name.lower().startswith("mmproj") or (shard and int(shard[1]) != 1)
        if path.is_file() and not is_part:
            found[_SHARD.sub("", path.stem)] = path
    return found


def shards(path: Path) -> list[Path]:
    """Return the files of a GGUF model."""
    first = _SHARD.search(path.stem)
    return [path] if first is None else [*path.parent.glob(f"{path.stem[: first.start()]}-*.gguf")]


def no_config(directory: Path) -> ModelError:
    """Return the error for a directory without ``config.json``."""
    return ModelError(
        f"{directory} is not a model directory: it has no config.json{gguf_remedy(directory)}"
    )


def gguf_remedy(directory: Path) -> str:
    """Return the end of a message that names the GGUF files of a directory, if it has any."""
    found = [str(path) for path in gguf_files(directory).values()]
    if not found:
        return ""
    more = [f"{len(found) - _MOST_NAMED} other files"] if len(found) > _MOST_NAMED else []
    return f" (pass the GGUF file: {' or '.join([*found[:_MOST_NAMED], *more])})"
