"""Use a folder of the user's cache only if it is private.

A cache decides how a program computes, or is loaded into it as code. So a folder or a file is used
only if no other user can have written to it.
"""

import hashlib
import json
import mmap
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

DIGEST_BYTES = 32
MAX_BYTES = 1 << 20
"""Bytes of a JSON file that is read. mie's own files are far smaller."""

_OPEN = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
"""Flags with which a pipe does not make `open` wait, and a link is refused."""
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class CacheError(Exception):
    """A cache cannot be used. The message names the folder and the reason."""


def cache_path(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return where the cache ``name`` of mie belongs, whether it exists or not.

    That is in $XDG_CACHE_HOME, or in ~/.cache without the variable. The XDG Base Directory
    Specification says to ignore a relative path in it.

    Raises:
        CacheError: the user has no home directory.
    """
    base = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "mie" / name
    with suppress(RuntimeError):
        home = Path.home()
        if home.is_absolute():
            return home / ".cache" / "mie" / name
    raise CacheError("there is no cache: the user has no home directory (set XDG_CACHE_HOME)")


def open_cache(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Make the folder of the cache ``name`` if needed, and return it. It is private.

    Raises:
        CacheError: it cannot be made, or other users may have written to it or to its parent.
    """
    path = cache_path(name, environment)
    return private_folder(path, path.parent)


def private_folder(path: Path, *above: Path) -> Path:
    """Make a folder for private data if needed, and return it. Folders ``above`` are private too.

    Raises:
        CacheError: it cannot be made, or other users may have written to it or to one above.
    """
    try:
        _make(path)
        for folder in (*above, path):
            _check(folder)
    except OSError as error:
        raise CacheError(f"the cache {path} cannot be used: {error.strerror}") from None
    return path


def is_private_file(path: Path) -> bool:
    """Return whether ``path`` is a regular file that only this user can have written."""
    try:
        about = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and _is_private(about)


def read_kept(cache: str, name: str) -> bytes | None:
    """Return the content of a file of a cache, or None if there is none whole and private."""
    content = map_kept(cache, name)
    return None if content is None else bytes(content)


def map_kept(cache: str, name: str) -> memoryview | None:
    """Return the same content as `read_kept`, but map it. Only parts that are read take memory."""
    with suppress(OSError, ValueError, CacheError):  # an empty file cannot be mapped
        path = open_cache(cache) / name
        if is_private_file(path):
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            content = memoryview(mapped)
            if hashlib.sha256(content[DIGEST_BYTES:]).digest() == content[:DIGEST_BYTES]:
                release(content)
                return content[DIGEST_BYTES:]
    return None


def release(content: memoryview) -> None:
    """Give the memory of a mapped file back. Parts that are read later take memory again."""
    mapped: Any = content.obj
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def write_kept(cache: str, name: str, content: bytes, max_files: int | None = None) -> None:
    """Keep a file in a cache, if there is one, with a digest before the content.

    Of more than ``max_files`` files, the oldest are removed.
    """
    import tempfile  # takes 5 ms, and a full cache is only read

    with suppress(OSError, CacheError):
        folder = open_cache(cache)
        handle, temporary = tempfile.mkstemp(dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, folder / name)
        except BaseException:
            with suppress(FileNotFoundError):  # An interrupt can come after it was moved.
                os.unlink(temporary)
            raise
        if max_files is not None:
            files = sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
            for path in files[:-max_files]:
                path.unlink()


def read_json(path: Path) -> Any:
    """Return the file's content, or None if it is missing, damaged, too large or not private."""
    with suppress(OSError, ValueError, RecursionError):
        handle = os.open(path, _OPEN)
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            if stat.S_ISREG(about.st_mode) and _is_private(about):
                text = file.read(MAX_BYTES + 1)
                return json.loads(text) if len(text) <= MAX_BYTES else None
    return None


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` to the file atomically.

    Raises:
        CacheError: it cannot be written.
    """
    import tempfile  # takes 5 ms, and a full cache is only read

    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror}") from None


def _make(path: Path) -> None:
    """Make the folder and its missing parents with mode 0700, independent of the umask."""
    if path.is_dir():
        return
    _make(path.parent)
    with suppress(FileExistsError):  # another process was faster, or it is not a folder
        path.mkdir(mode=0o700)


def _check(folder: Path) -> None:
    """Check that no other user can write to the folder, and close it to readers.

    Raises:
        CacheError: it is not private.
    """
    about = os.stat(folder)
    if not stat.S_ISDIR(about.st_mode):
        raise CacheError(f"the cache {folder} cannot be used: it is not a folder")
    owner = os.geteuid()
    if about.st_uid != owner or os.lstat(folder).st_uid != owner:
        raise CacheError(
            f"the cache {folder} is not used: it belongs to user {about.st_uid}, not to user "
            f"{owner}, who runs this program (choose a folder of your own, with XDG_CACHE_HOME "
            "for the caches of compiled kernels)"
        )
    if about.st_mode & _WRITABLE_BY_OTHERS:
        raise CacheError(
            f"the cache {folder} is not used: other users may write to it (remove it: mie "
            "makes a new one with mode 0700)"
        )
    if stat.S_IMODE(about.st_mode) != 0o700:
        folder.chmod(0o700)


def _is_private(about: os.stat_result) -> bool:
    return about.st_uid == os.geteuid() and not about.st_mode & _WRITABLE_BY_OTHERS
