"""Read untrusted files, and write files whole.

A model directory or a trace comes from a stranger. The files can be links to an endless device, or
pipes without a writer. Both are refused before anything is read: files are regular ones, of a
limited size, and reading never waits.
"""

import codecs
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from mie.errors import ConfigError, MieError, shown

MAX_DIGITS = 1000
"""Digits of an integer in JSON. Parsing takes time that grows with their square."""

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
        OSError: the file cannot be opened, or is something else. ``strerror`` has the reason.
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


def digest_of(path: Path, digest: "hashlib._Hash | hashlib.blake2b") -> str:
    """Add a file to a digest of hashlib, in pieces, and return the digest in hexadecimal.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class LateFile(io.TextIOWrapper):
    """A text file that keeps its former contents until the first write.

    A command may open its output before it checks anything else, and loses nothing if it fails. If
    nothing was written, closing removes a file that did not exist before.

    Raises:
        OSError: the file cannot be opened for writing.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_new = not os.path.lexists(path)
        self._is_begun = False
        super().__init__(open(path, "ab"), encoding="utf-8")  # noqa: SIM115  # `close` closes it

    def write(self, text: str) -> int:
        if not self._is_begun:
            self._is_begun = True
            if stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                self.truncate(0)
        return super().write(text)

    def close(self) -> None:
        super().close()
        if self._is_new and not self._is_begun:
            self._is_new = False
            os.unlink(self._path)


def is_unwritable(stream: TextIO) -> bool:
    """Return whether the output that waits in a stream cannot be written."""
    try:
        stream.flush()
    except OSError:
        return True
    return False


def without_bom(data: bytes) -> bytes:
    """Return the data of a UTF-8 text without the byte order mark that some editors write."""
    return data.removeprefix(codecs.BOM_UTF8)


def read_utf8(path: str | PathLike[str]) -> str:
    """Return the text of a file without its byte order mark, its lines ended by ``"\\n"``.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    text = without_bom(Path(path).read_bytes()).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json_object(path: Path, max_bytes: int, error_type: type[MieError]) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Raises:
        MieError: an ``error_type`` with the file in its message. The file is missing or unreadable,
            is not a regular file, is longer than ``max_bytes``, is not JSON, or holds something
            other than an object.
    """
    try:
        value = parse_json(read_file(path, max_bytes))
    except OSError as error:
        raise error_type(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise error_type(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise error_type(f"{path} must contain a JSON object, got {_json_type(value)}")
    return value


def parse_json(data: bytes) -> Any:
    """Parse the JSON text ``data``.

    An object that gives a name two different values is refused, because programs differ in which
    one they take.

    Raises:
        ValueError: it is not JSON in UTF-8, gives a name two values, or has an integer of too many
            digits.
        RecursionError: it is nested too deeply.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) == len(pairs):
            return values
        seen: dict[str, Any] = {}
        for name, value in pairs:
            if name in seen and seen[name] != value:
                raise ValueError(f"{shown(name)} is given twice")
            seen[name] = value
        return values

    return json.loads(
        without_bom(data).decode("utf-8"), object_pairs_hook=unique, parse_int=_integer
    )


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits; the limit is {MAX_DIGITS:,}")
    return int(digits)


def _json_type(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


@contextmanager
def replacing(target: str, option: str, source: str | None = None) -> Iterator[TextIO]:
    """Open a file that replaces ``target`` if the block succeeds. Otherwise nothing changes.

    ``option`` named the target. ``source`` is the file that is read. It must stay.

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
