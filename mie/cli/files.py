"""Write a file whole, or leave it as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from mie.errors import ConfigError


@contextmanager
def replacing(target: str, option: str, source: str | None = None) -> Iterator[TextIO]:
    """Open a file that replaces ``target`` if the block succeeds. Otherwise nothing changes.

    ``option`` named the target. ``source`` is the file that is read, which must stay.

    Raises:
        ConfigError: ``target`` cannot be written.
    """
    path = Path(target).resolve()
    is_source = source is not None and path.exists() and path.samefile(source)
    if path.exists() and (not path.is_file() or is_source):
        raise ConfigError(f"{option} would overwrite {path}; choose another file")
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        file = draft.open("x", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    try:
        with file:
            yield file
        try:
            draft.replace(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
