"""Make model directories, and pieces of hostile files."""

import json
import struct
from pathlib import Path
from typing import Any

import tiny_models
from event_stories import tell
from safetensors.numpy import save_file

from mie.events import EventLog

HUGE = "1" + 400 * "0"
"""An integer larger than every float."""

VIEWS = (
    ["trace"],
    ["trace", "--all"],
    ["trace", "--step", "3"],
    ["trace", "--perfetto", "OUT"],
    ["trace", "--page", "OUT"],
)
"""Commands that read a trace. OUT stands for a file."""


def model_directory(directory: Path, **changes: Any) -> Path:
    """Write a model with random weights, and ``changes`` in its ``config.json``."""
    config = tiny_models.LLAMA
    tiny_models.write_model(directory, config, tiny_models.random_weights(config))
    return with_config(directory, **changes)


def with_config(directory: Path, **changes: Any) -> Path:
    """Write a ``config.json`` with the changes and return the directory. Ellipsis removes a key."""
    config = {**tiny_models.LLAMA, **changes}
    kept = {key: value for key, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(kept))
    return directory


def with_raw(directory: Path, key: str, text: str) -> Path:
    """Add ``key`` with a value that is spelled ``text`` in JSON. Return the directory."""
    config = json.dumps({name: x for name, x in tiny_models.LLAMA.items() if name != key})
    (directory / "config.json").write_text(f'{config[:-1]}, "{key}": {text}}}')
    return directory


def safetensors(header: bytes | str | object, data: bytes = b"") -> bytes:
    """Return a weights file with a header, which is text or is converted to JSON."""
    if isinstance(header, str):
        header = header.encode()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: str = "[1]", dtype: str = '"F32"', offsets: str = "[0, 4]") -> str:
    """Return a tensor of a header, as text."""
    return f'{{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}'


def nested(depth: int, left: str = "[", right: str = "]", middle: str = "") -> str:
    """Return JSON text of nested lists or objects."""
    return left * depth + middle + right * depth


def write_shards(directory: Path) -> dict[str, str]:
    """Split the model's weights into two shards, and return the weight map of their index."""
    tensors = tiny_models.random_weights(tiny_models.LLAMA)
    (directory / "model.safetensors").unlink(missing_ok=True)
    weight_map = {}
    for shard in ("a.safetensors", "b.safetensors"):
        part = {name: x for name, x in tensors.items() if ("layers" in name) == (shard[0] == "a")}
        save_file(part, directory / shard)
        weight_map |= dict.fromkeys(part, shard)
    return weight_map


def story(directory: Path) -> list[str]:
    """Return the lines of a log with every kind of record."""
    path = directory / "story.jsonl"
    with path.open("w") as file:
        log = EventLog(0, file)
        tell(log)
        log.close()
    return path.read_text().splitlines()
