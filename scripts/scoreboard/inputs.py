"""Find the inputs of cases, and check that they are the published files."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mie.base.files import digest_of

RAW = "https://raw.githubusercontent.com"


class MissingInputError(Exception):
    """An input is not in the folders, or has other contents than the published file."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """A public file."""

    name: str
    """Path of the file in the folder of data or models."""
    sha256: str
    """Digest of the unpacked file."""
    origin: str
    """Public address of the file, or the command that gets it."""


def read_table() -> dict[str, Input]:
    """Return the inputs of `inputs.json` by name.

    In the file, inputs with one origin share an entry, and the origin ends with "/" if the name of
    the file is left out.
    """
    found: dict[str, Input] = {}
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    for entry in json.loads(text):
        for name, sha256 in entry["files"].items():
            origin = entry["origin"]
            origin += Path(name).name if origin.endswith("/") else ""
            found[name] = Input(name=name, sha256=sha256, origin=origin)
    return found


def find_input(each: Input, folders: Sequence[Path], build: Path) -> Path:
    """Return the path of an input, unpacked to ``build`` if a folder has only NAME.xz.

    Raises:
        MissingInputError: no folder has the file, or the digest is another one.
    """
    for folder in folders:
        path, packed = folder / each.name, folder / f"{each.name}.xz"
        if packed.exists() and not path.exists():
            path = build / each.name
            if not path.exists() or digest_of(path, hashlib.sha256()) != each.sha256:
                path.parent.mkdir(parents=True, exist_ok=True)
                with lzma.open(packed) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target)
        if path.exists():
            digest = digest_of(path, hashlib.sha256())
            if digest != each.sha256:
                raise MissingInputError(
                    f"{each.name} has sha256 {digest[:12]}…, and the published file has "
                    f"{each.sha256[:12]}… (get it again: {each.origin})"
                )
            return path
    raise MissingInputError(f"{each.name} is missing (get it: {each.origin})")


def get_input(each: Input, folder: Path) -> Path:
    """Put an input into a folder, from GitHub or a package index.

    Raises:
        MissingInputError: the origin is neither, or the file could not be had.
    """
    path = folder / each.name
    folder.mkdir(parents=True, exist_ok=True)
    on_github = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+): (\S+)", each.origin)
    kind, _, package = each.origin.rpartition(" ")
    try:
        if on_github:
            path.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(f"{RAW}/{on_github[1]}/HEAD/{on_github[2]}") as reply:
                path.write_bytes(reply.read())
        elif kind == "npm pack":
            subprocess.run(["npm", "pack", package], cwd=folder, check=True, capture_output=True)
        elif kind == "pip install --no-deps --target DIR":
            pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder)]
            subprocess.run([*pip, package], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingInputError(f"{each.name} could not be had: {error}") from error
    return find_input(each, [folder], folder)
