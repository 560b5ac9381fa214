"""Read the headers of a model's weights on the hub, and leave their data there."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mie.checkpoint.hub import HubModel, HubName, ask_hub, download, hub_errors
from mie.checkpoint.size_limits import MAX_GGUF_HEADER_BYTES, MAX_HEADER_BYTES
from mie.errors import WeightsError

_SETTINGS = {"config.json", "generation_config.json", "model.safetensors.index.json"}
_MAX_LIST_BYTES = 4 << 20
"""Bytes that are fetched of each later part of a GGUF model. It has a list of tensors only."""


@contextmanager
def without_data(name: HubName) -> Iterator[Path]:
    """Yield a temporary directory, or a GGUF file, that is like the model but has no weights.

    A file of weights has its size and its header; its data are a hole, and read as zeros.

    Raises:
        ModelError: the hub does not give the files.
        WeightsError: a header is too large.
    """
    model = ask_hub(name.repo)
    chosen = model.choose(name.tag)
    weights = [each for each in chosen if each.endswith((".safetensors", ".gguf"))]
    with TemporaryDirectory(prefix="mie-headers-") as folder:
        for each in _SETTINGS.intersection(chosen):
            shutil.copy(download(model, [each]) / each, Path(folder, each))
        first = Path(min(weights)).name
        for each in weights:
            path = Path(folder, Path(each).name)
            most = MAX_GGUF_HEADER_BYTES if path.name == first else _MAX_LIST_BYTES
            _write_header(model, each, path, most)
        yield Path(folder, first) if first.endswith(".gguf") else Path(folder)


def _write_header(model: HubModel, name: str, path: Path, most_of_gguf: int) -> None:
    from huggingface_hub import HfFileSystem, constants

    size = model.files[name].size
    with hub_errors(model.repo), path.open("wb") as target:
        hub: Any = HfFileSystem(endpoint=constants.ENDPOINT)
        place = f"{model.repo}@{model.commit}/{name}"
        with hub.open(place, size=size, cache_type="none") as source:
            if name.endswith(".gguf"):
                target.write(source.read(min(size, most_of_gguf)))
            else:
                prefix = source.read(8)
                length = int.from_bytes(prefix, "little")
                if length > MAX_HEADER_BYTES:
                    raise WeightsError(
                        f"{name} of {model.repo} has a header of {length} bytes; the limit is "
                        f"{MAX_HEADER_BYTES}"
                    )
                target.write(prefix + source.read(length))
        target.truncate(size)
