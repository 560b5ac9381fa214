"""Open untrusted files: regular ones, of a limited size, without waiting.

A model directory or a trace comes from a stranger. Its files can be links to an endless device, or
pipes that have no writer. Both are refused before anything is read.
"""

from __future__ import annotations

import errno
import os
import stat
from os import PathLike
from typing import BinaryIO

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_file(path: str | PathLike[str], *, allow_pipe: bool = False) -> BinaryIO:
    """Open a regular file for reading, or a pipe where the caller allows one.

    The call never waits. A pipe without a writer is empty.

    Raises:
        OSError: the file cannot be opened, or is something else. Its ``strerror`` says why.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL character, or half of a surrogate pair
        raise OSError(errno.EINVAL, "its name is not a file name", str(path)) from error
    try:
        mode = os.fstat(number).st_mode
        is_pipe = allow_pipe and stat.S_ISFIFO(mode)
        if not stat.S_ISREG(mode) and not is_pipe:
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        os.set_blocking(number, is_pipe)  # some regular files of /proc would wait, too
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_file(path: str | PathLike[str], max_bytes: int) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or is longer than ``max_bytes``.
    """
    with open_file(path) as file:
        data = file.read(max_bytes + 1) or b""  # None: a file of /proc has no data yet
    if len(data) > max_bytes:
        raise OSError(
            errno.EFBIG, f"it has more than {max_bytes:,} bytes, which is the limit", str(path)
        )
    return data
