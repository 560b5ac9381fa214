"""Write the files that ``mie trace`` makes: complete, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from mie.errors import ConfigError


@contextmanager
def replacing(path: Path, source: Path | None, option: str) -> Iterator[TextIO]:
    """Open a file that replaces ``path`` if the block succeeds. Otherwise nothing changes.

    ``source`` is the log, which must stay, and ``option`` is the one that named ``path``.

    Raises:
        ConfigError: ``path`` cannot be written.
    """
    path = path.resolve()
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
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
