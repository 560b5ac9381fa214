"""Write and read segments: files of many blocks, with an index and checksums.

A segment has these parts::

    magic, 8 bytes | the blocks, one after another | index, JSON | footer, 48 bytes

The footer has the place, the size and the checksum of the index, and the magic once more. A
segment is written under another name and renamed when it is complete. Nothing calls ``fsync``:
after a power failure a segment may be missing or damaged, and damaged segments and blocks are not
used.
"""

from __future__ import annotations

import json
import operator
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mie.disk.identity import KEY_BYTES

MAGIC = b"mie-kv\x00\x02"
"""The last byte is the version of the format."""
SUFFIX = ".blocks"
MAX_INDEX_BYTES = 1 << 26
_FOOTER = struct.Struct(f"<QQ{KEY_BYTES}s8s8x")


class Damaged(Exception):
    """A segment or a block is not used. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Block:
    """A content of a node of the prefix tree that is about to be written."""

    key: bytes
    part: str
    """The content: "block", "window" or "state"."""
    parent: bytes
    """The key of the block before it, or the root of the salt."""
    position: int
    """Position of its first token."""
    token_ids: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of a content in a segment."""

    segment: Path
    key: bytes
    part: str
    parent: bytes
    position: int
    token_ids: tuple[int, ...]
    offset: int
    size: int
    checksum: bytes


def write_segment(path: Path, blocks: Iterable[Block]) -> list[Entry]:
    """Write blocks to a new file and return their places.

    Raises:
        OSError: the file cannot be written. Nothing is left of it.
    """
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(MAGIC)
            entries = []
            for block in blocks:
                place = file.tell(), len(block.data), checksum(block.data)
                names = block.key, block.part, block.parent
                entries.append(Entry(path, *names, block.position, block.token_ids, *place))
                file.write(block.data)
            index = json.dumps([_as_json(entry) for entry in entries]).encode()
            at = file.tell()
            file.write(index)
            file.write(_FOOTER.pack(at, len(index), checksum(index), MAGIC))
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    return entries


def read_index(path: Path) -> list[Entry]:
    """Return the places of the blocks in a segment.

    Raises:
        OSError: the file cannot be read.
        Damaged: the file is torn, corrupt, of another version, or no segment.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        magic = file.read(len(MAGIC))
        if magic[:-1] != MAGIC[:-1]:
            raise Damaged("the file does not begin as a segment")
        if magic != MAGIC:
            raise Damaged(f"format version {magic[-1]} is not version {MAGIC[-1]}")
        if size < len(MAGIC) + _FOOTER.size:
            raise Damaged(f"the file ends after {size:,} bytes")
        file.seek(size - _FOOTER.size)
        at, length, expected, end = _FOOTER.unpack(file.read(_FOOTER.size))
        if end != MAGIC or length > MAX_INDEX_BYTES or at + length + _FOOTER.size != size:
            raise Damaged("the footer is torn")
        file.seek(at)
        index = file.read(length)
    if checksum(index) != expected:
        raise Damaged("the checksum of the index differs")
    try:
        entries = [_from_json(path, fields) for fields in json.loads(index)]
    except (ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"the index is no list of blocks: {error}") from error
    if not all(0 <= each.offset <= each.offset + each.size <= at for each in entries):
        raise Damaged("the index has a block outside the file")
    return entries


def read_block(entry: Entry) -> bytes:
    """Return the bytes of a block.

    They are read, not mapped, because a mapped file that another process cuts short ends this
    process.

    Raises:
        OSError: the file cannot be read, or another process has removed it.
        Damaged: the bytes are not the bytes that were written.
    """
    handle = os.open(entry.segment, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(handle, entry.size, entry.offset)
    finally:
        os.close(handle)
    if len(data) != entry.size or checksum(data) != entry.checksum:
        raise Damaged(f"the checksum of the block at byte {entry.offset:,} differs")
    return data


def checksum(data: bytes) -> bytes:
    """Return a checksum that no accident repeats."""
    return blake2b(data, digest_size=KEY_BYTES).digest()


def _as_json(entry: Entry) -> list[Any]:
    names = entry.key.hex(), entry.part, entry.parent.hex(), entry.checksum.hex()
    return [*names, entry.offset, entry.size, entry.position, *entry.token_ids]


def _from_json(path: Path, fields: list[Any]) -> Entry:
    key, part, parent, expected, *numbers = fields
    offset, size, position, *token_ids = map(operator.index, numbers)
    names = bytes.fromhex(key), part, bytes.fromhex(parent), position, tuple(token_ids)
    return Entry(path, *names, offset, size, bytes.fromhex(expected))
