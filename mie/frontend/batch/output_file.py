"""The file of records that a run of `mie batch` continues."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from mie.errors import ConfigError, RequestError
from mie.frontend.batch.lines import json_object


@contextmanager
def continued(path: str) -> Iterator[tuple[BinaryIO, set[str]]]:
    """Open a file of records for adding, and keep other runs from it.

    Return it with every custom_id that it has. The last line is cut off if a run could not complete
    it.

    Raises:
        ConfigError: the file cannot be written, or another run writes it.
        RequestError: another line is no record, or the last one is not even the beginning of one.
    """
    try:
        file = open(path, "a+b")  # noqa: SIM115  # closed below
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # reading it may never end
            raise ConfigError(f"cannot write {path}: it is not a regular file")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{path} is being written by another mie batch") from error
        yield file, _finished(file, path)


def _finished(file: BinaryIO, path: str) -> set[str]:
    file.seek(0)
    done: set[str] = set()
    size, torn = 0, None
    for number, raw in enumerate(file, start=1):
        if torn is not None:
            raise RequestError(f"{torn} (delete the line, and its request is answered again)")
        try:
            record = json_object(raw, f"{path}, line {number}")
        except RequestError as error:
            if raw.strip(b"\0\r\n")[:1] not in (b"", b"{"):  # a lost block is full of zeros
                raise
            torn = error
            continue
        key = record.get("custom_id")
        if not isinstance(key, str) or "response" not in record:
            raise RequestError(
                f"{path}, line {number} is no record of an answer: it needs a custom_id and a "
                "response; choose another OUT"
            )
        if raw.endswith(b"\n"):
            done.add(key)
            size += len(raw)
    file.truncate(size)
    return done
