"""Find the directory of a model from the name that a user gives."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mie.errors import ConfigError, MissingExtraError, ModelError

BUNDLED = "bundled"
BUNDLED_DIRECTORY = Path(__file__).resolve().parent.parent / "assets" / "tiny"

# The files that are read from a model directory. These are patterns, so absent files are not an
# error. Weights in other layouts ("consolidated", PyTorch pickles, ONNX) would waste time and
# space.
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_WEIGHTS = tuple(name for name in HUB_FILES if "safetensors" in name)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate_model(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_weights: bool = True,
) -> Path:
    """Return the directory of the model ``name``, or its GGUF file.

    The name is ``"bundled"``, a directory, a GGUF file, or a Hugging Face hub id such as
    ``"HuggingFaceTB/SmolLM2-135M"``. A directory or a file takes precedence. A quantisation after
    a hub id (``"org/name:Q4_K_M"``) chooses the GGUF file whose name ends in it. Only the files
    that are read are fetched from the hub, into its usual cache or ``cache_dir``.

    Raises:
        ConfigError: a revision is given for a directory or a file.
        ModelError: there is no such directory, or the hub does not provide the model.
        MissingExtraError: it is a hub id, and ``huggingface_hub`` is not installed.
    """
    name = os.fspath(name)
    path = Path(name).expanduser()
    is_gguf = path.suffix == ".gguf" and path.is_file()
    # an empty name is not the current directory
    if name == BUNDLED or is_gguf or (name and path.is_dir()):
        if revision not in (None, "main"):
            kind = "file" if is_gguf else "directory"
            raise ConfigError(
                f"revision={revision!r} needs a hub id; {name!r} is a {kind} (leave it out)"
            )
        return _bundled() if name == BUNDLED else path
    if path.is_file():
        raise ModelError(
            f"model {name!r} is a file; pass a .gguf file, or the directory that holds config.json"
        )
    hub_id, _, quantisation = name.partition(":")
    if _HUB_ID.fullmatch(hub_id) and re.fullmatch(r"\w+", quantisation):
        ends = [f"*{quantisation}.gguf", f"*{quantisation}-?????-of-?????.gguf"]
        return _one_gguf(_download(hub_id, ends, revision, cache_dir), ends)
    if _HUB_ID.fullmatch(name):
        unwanted = () if needs_weights else _WEIGHTS
        patterns = [pattern for pattern in HUB_FILES if pattern not in unwanted]
        return _download(name, patterns, revision, cache_dir)
    raise ModelError(
        f"model directory {name!r} does not exist; a model is {BUNDLED!r}, a directory in Hugging "
        "Face format, a .gguf file, or a hub id such as 'HuggingFaceTB/SmolLM2-135M'"
    )


def _bundled() -> Path:
    if not (BUNDLED_DIRECTORY / "config.json").exists():
        raise ModelError(
            f"this installation lacks the bundled model ({BUNDLED_DIRECTORY}); install mie again, "
            "or pass a model directory"
        )
    return BUNDLED_DIRECTORY


def _one_gguf(directory: Path, ends: list[str]) -> Path:
    """Return the file of ``directory`` with one of the ``ends``, or the first of its shards."""
    found = sorted(path for end in ends for path in directory.rglob(end))
    if not found or len({re.sub(r"\d{5}-of", "", path.name) for path in found}) > 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ModelError(f"one GGUF file must end in {' or '.join(ends)}; found: {names}")
    return found[0]


def _download(
    hub_id: str,
    patterns: list[str],
    revision: str | None,
    cache_dir: str | os.PathLike[str] | None,
) -> Path:
    """Return the local snapshot of the hub's model, downloading it if needed."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingExtraError(
            f"there is no directory {hub_id!r}, and fetching a hub id takes huggingface_hub, which "
            "is not installed: pip install 'mie[hub]'"
        ) from error
    try:
        found = snapshot_download(
            hub_id,
            allow_patterns=patterns,
            revision=revision,
            cache_dir=None if cache_dir is None else Path(cache_dir),
        )
        return Path(found)
    except Exception as error:  # its network stack raises errors of several libraries
        raise ModelError(
            f"there is no directory {hub_id!r}, and the Hugging Face hub did not give a model of "
            f"that name: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
