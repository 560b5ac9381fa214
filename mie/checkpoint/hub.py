"""Find and fetch models of the Hugging Face hub, and the models of its cache on this machine.

A model has a name such as "HuggingFaceTB/SmolLM2-135M". The file of a GGUF repository is chosen by
its quantisation: "org/model-GGUF:Q8_0". The only store is the cache of ``huggingface_hub``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mie.base.files import digest_of
from mie.checkpoint.hub_errors import hub_error
from mie.errors import ModelError, shown

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
"""Patterns of the files that are read from a model directory. Absent files are not an error.

Weights in other layouts ("consolidated", PyTorch pickles, ONNX) would waste time and space.
"""

BLOCK_BYTES = 8 << 20
"""Bytes of a request, and the most that an interrupted download loses."""

DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
"""The quantisations that a name without one means, in a repository with several."""

_NAME = re.compile(
    r"(?:(?:https://)?(?:huggingface\.co|hf\.co)/)?"
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?",
    re.ASCII,
)
_TAG = re.compile(
    r"(?:^|[-._/])((?:UD-)?I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|FP?16|FP?32)"
    r"(?:-(\d{5})-of-(\d{5}))?\.gguf$",
    re.IGNORECASE,
)
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.(?:gguf|safetensors)$")


@dataclass(frozen=True)
class HubName:
    """The name of a model on the hub, and the quantisation that is chosen."""

    repo: str
    tag: str | None = None

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        """Return the parts of ``name``, or None if it cannot be a name on the hub."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(found[1], found[2])

    def __str__(self) -> str:
        return self.repo if self.tag is None else f"{self.repo}:{self.tag}"


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file of a model. ``sha256`` is None for a small one, and ``path`` if it is not here."""

    size: int
    sha256: str | None = None
    path: Path | None = None


Files = Mapping[str, HubFile]
"""Files by their names in the repository."""


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model of the hub at one commit, or as much of it as the cache holds."""

    repo: str
    commit: str
    files: Files
    last_used: float | None = None

    @property
    def tags(self) -> dict[str, list[str]]:
        """The names of the GGUF files by their quantisations, in order. A large one has several."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.files):
            match = _TAG.search(name)
            if match and not Path(name).name.lower().startswith("mmproj"):
                found.setdefault(match[1].upper(), []).append(name)
        return found

    @property
    def names(self) -> list[str]:
        """The names with which the complete models of these files are run."""
        here = [self.repo] if self.is_complete(self.directory_files()) else []
        return here + [f"{self.repo}:{t}" for t, f in self.tags.items() if self.is_complete(f)]

    def directory_files(self) -> list[str]:
        """Return the files of a model directory: settings, tokenizer and safetensors."""
        return [name for name in self.files if any(fnmatch(name, each) for each in HUB_FILES)]

    def is_complete(self, names: Collection[str]) -> bool:
        """Return whether these files are a model: no part of the weights is missing."""
        weights = [name for name in names if name.endswith((".gguf", ".safetensors"))]
        is_gguf = any(name.endswith(".gguf") for name in weights)
        totals = {int(found[1]) for name in weights if (found := _SHARD.search(name))}
        expected = max(totals, default=1)
        return len(weights) >= expected and (is_gguf or "config.json" in names)

    def size(self, names: Collection[str]) -> int:
        """Return the bytes of these files."""
        return sum(self.files[name].size for name in names)

    def choose(self, tag: str | None) -> list[str]:
        """Return the files of the quantisation ``tag``, or of the model if it is None.

        A ``tag`` may also be a file's name. Without one, a directory in Hugging Face format comes
        before the only GGUF file, and that before `DEFAULT_TAGS`.

        Raises:
            ModelError: there is no such quantisation, or no model that can be run.
        """
        tags, whole = self.tags, self.directory_files()
        if tag is None:
            if self.is_complete(whole):
                return whole
            found = next((tags[name] for name in DEFAULT_TAGS if name in tags), None)
            found = found or (next(iter(tags.values())) if len(tags) == 1 else None)
        else:
            wanted = tag.upper()
            found = tags.get(wanted) or tags.get(f"UD-{wanted}")
            found = found or [name for name in self.files if name == tag and tag.endswith(".gguf")]
        if found:
            return found
        if tags:
            what = "has several quantisations" if tag is None else f"has no {tag!r}"
            raise ModelError(
                f"{self.repo} {what}; choose one of {', '.join(tags)}, as in "
                f"{self.repo}:{next(iter(tags))}"
            )
        if tag is not None and self.is_complete(whole):
            raise ModelError(
                f"{self.repo} has no GGUF files, from which ':{tag}' would choose (leave it out, "
                "or name a GGUF repository)"
            )
        raise ModelError(
            f"{self.repo} has no model in safetensors or GGUF files, only {_some(self.files)}; "
            "choose another repository"
        )


def ask_hub(repo: str, revision: str | None = None) -> HubModel:
    """Return the files of a model on the hub, with their sizes and checksums.

    Raises:
        ModelError: the hub does not give them. The message has the reason and the remedy.
    """
    with hub_errors(repo):
        from huggingface_hub import HfApi

        info: Any = HfApi().model_info(repo, revision=revision, files_metadata=True)
    files = {}
    for each in info.siblings or ():
        sha256 = each.lfs and each.lfs.sha256
        if sha256 and not re.fullmatch("[0-9a-f]{64}", sha256):  # it will be a file's name
            raise ModelError(f"{repo}: the hub's checksum {shown(sha256)} is not a SHA-256")
        files[each.rfilename] = HubFile(size=each.size or 0, sha256=sha256)
    return HubModel(repo=repo, commit=info.sha, files=files)


def cache_folder() -> Path:
    """Return the folder of ``huggingface_hub`` in which all models lie."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def cache_facts() -> dict[str, Any]:
    """Return the cache's "folder", its "free" bytes, and whether it "is_writable"."""
    folder = cache_folder().absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    is_writable = existing.is_dir() and os.access(existing, os.W_OK)
    free = shutil.disk_usage(existing).free
    return {"folder": str(folder), "free": free, "is_writable": is_writable}


def cached_models(cache_dir: Path | None = None) -> list[HubModel]:
    """Return the models in the cache by name, each as its newest revision on this machine."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir(cache_dir or cache_folder())
    except CacheNotFound:
        return []
    repos = [each for each in cache.repos if each.repo_type == "model" and each.revisions]
    return [_cached(repo) for repo in sorted(repos, key=lambda each: each.repo_id)]


def _cached(repo: Any) -> HubModel:
    newest = max(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
    root = newest.snapshot_path
    files = {
        each.file_path.relative_to(root).as_posix(): HubFile(
            size=each.size_on_disk, path=each.file_path
        )
        for each in newest.files
    }
    return HubModel(
        repo=repo.repo_id, commit=newest.commit_hash, files=files, last_used=repo.last_accessed
    )


def find_cached(name: HubName, cache_dir: Path | None = None) -> Path | None:
    """Return the directory or the GGUF file of a model in the cache, or None.

    The parts of a large GGUF model lie beside the first one. The first one is returned.
    """
    for model in cached_models(cache_dir):
        if model.repo == name.repo:
            try:
                chosen = model.choose(name.tag)
            except ModelError:
                return None
            return model_path(model, chosen) if model.is_complete(chosen) else None
    return None


def model_path(model: HubModel, names: Collection[str]) -> Path:
    """Return the path that loads these cached files."""
    first = min(names)
    path = model.files[first].path
    assert path is not None, "the model is in the cache"
    return path if first.endswith(".gguf") else path.parent


Progress = Callable[[str, int, int], object]
"""Called before a file is fetched: its name, its size, and the bytes that are here already."""


def download(
    model: HubModel,
    names: Collection[str],
    tell: Progress = lambda name, size, here: None,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """Fetch these files into the cache, check them, and return the path that loads them.

    A large file that was interrupted goes on where it ended. It enters the cache only if it has
    the hub's SHA-256.

    Raises:
        ModelError: the hub does not give a file, it is damaged, or the disk is full.
    """
    from huggingface_hub import snapshot_download, utils

    bars: Any = utils  # its documented tqdm has no types

    class NoBar(bars.tqdm):  # type: ignore[misc]
        """Shows nothing: the large files have had their bars, and the others are small."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    cache = cache_dir or cache_folder()
    blobs = cache / _folder(model.repo) / "blobs"
    with hub_errors(model.repo):
        for name in names:
            file = model.files[name]
            if file.sha256 is not None:
                _fetch_blob(model, name, blobs, tell)
        patterns = [*map(_exact, names)]
        root = snapshot_download(
            model.repo,
            allow_patterns=patterns,
            revision=revision,
            cache_dir=cache,
            tqdm_class=NoBar,
        )
    first = min(names)
    return Path(root, first) if first.endswith(".gguf") else Path(root)


def _fetch_blob(model: HubModel, name: str, blobs: Path, tell: Progress) -> None:
    """Fetch one large file. If the download is interrupted, the cache keeps the beginning.

    `snapshot_download` deletes what it has of a file when the program ends, and compares sizes
    only.
    """
    from huggingface_hub import HfFileSystem, constants, utils

    file = model.files[name]
    blob, draft = blobs / f"{file.sha256}", blobs / f"{file.sha256}.mie.incomplete"
    if blob.exists():
        return
    blobs.mkdir(parents=True, exist_ok=True)
    with draft.open("ab") as target:
        fcntl.flock(target, fcntl.LOCK_EX)  # until another "mie pull" of this file ends
        if blob.exists():
            return
        here = target.tell()
        if here > file.size:
            target.truncate(here := 0)
        tell(name, file.size, here)
        path = f"{model.repo}@{model.commit}/{name}"
        hub = HfFileSystem(endpoint=constants.ENDPOINT)
        bars: Any = utils  # its documented tqdm has no types
        bar = bars.tqdm(total=file.size, initial=here, unit="B", unit_scale=True, disable=None)
        with bar, hub.open(path, size=file.size, cache_type="none") as source:
            source.seek(here)
            while block := source.read(BLOCK_BYTES):
                target.write(block)
                target.flush()
                bar.update(len(block))
        found = digest_of(draft, hashlib.sha256())
        if found != file.sha256:
            draft.unlink()
            raise ModelError(
                f"{name} of {model.repo} arrived damaged: its SHA-256 is {found}, and the hub's is "
                f"{file.sha256}; it was deleted (pull it again; if that does not help, a proxy or "
                "mirror changes it)"
            )
        draft.rename(blob)


def _folder(repo: str) -> str:
    """Return the name of a model's folder in the cache, as its documented layout has it."""
    return f"models--{repo.replace('/', '--')}"


def _exact(name: str) -> str:
    """Return the pattern that matches only this name."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def remove(name: HubName) -> int:
    """Delete a model from the cache, or one quantisation of it, and return the bytes freed.

    Raises:
        ModelError: it is not in the cache, or the library is too old to delete single files.
    """
    from huggingface_hub import scan_cache_dir

    models = {model.repo: model for model in cached_models()}
    folder = cache_folder() / _folder(name.repo)
    if name.repo not in models and folder.is_dir():  # an interrupted download, and no more
        freed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        shutil.rmtree(folder)
        return freed
    if name.repo not in models:
        known = [each for model in models.values() for each in model.names]
        raise ModelError(f"{name} is not on this machine; it has {_some(known) or 'no models'}")
    model = models[name.repo]
    chosen = None if name.tag is None else {model.files[x].path for x in model.choose(name.tag)}
    cache = scan_cache_dir(cache_folder())
    [repo] = [x for x in cache.repos if (x.repo_id, x.repo_type) == (name.repo, "model")]
    files: list[Any] = [file for each in repo.revisions for file in each.files]
    if chosen is None or chosen >= {file.file_path for file in files}:
        strategy = cache.delete_revisions(*(each.commit_hash for each in repo.revisions))
    elif hasattr(cache, "delete_files"):
        strategy = cache.delete_files(*(file for file in files if file.file_path in chosen))
    else:
        raise ModelError(
            f"this huggingface_hub deletes only whole models (pip install -U huggingface_hub; or "
            f"mie rm {name.repo}, which deletes {_some(model.names)})"
        )
    strategy.execute()
    return strategy.expected_freed_size


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn every error of the hub's library and of the network into a `ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # the network's libraries have errors of their own
        raise hub_error(error, name) from error


def _some(names: Collection[str]) -> str:
    """Return the first names, and the number of the others."""
    first, rest = list(names)[:5], len(names) - 5
    return ", ".join(first) + (f" and {rest} others" if rest > 0 else "")
