"""Test the store of blocks: other processes, full disks, damaged files, and the limit of bytes."""

import errno
import json
import logging
import os
import stat
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audit import writer_of
from deadlines import join
from forks import exit_code_of_child

from mie.base.cache_dir import CacheError
from mie.disk import store as store_module
from mie.disk.folder import remove_shelf, shelves
from mie.disk.identity import Identity, child
from mie.disk.segment import (
    MAGIC,
    SUFFIX,
    Block,
    Damaged,
    checksum,
    read_block,
    read_index,
    write_segment,
)
from mie.disk.store import BlockStore

IDENTITY = Identity(
    weights="w",
    numerics="n",
    cache_dtype="auto",
    activations="float32",
    block_size=2,
    block_bytes=100,
    parts="",
)


def open_store(folder: Path, identity: Identity = IDENTITY, max_bytes: int = 1 << 20) -> BlockStore:
    return BlockStore(folder, identity, max_bytes=max_bytes, model={"model": "m", "num_layers": 1})


def blocks_of(tokens: list[int], salt: str | None = None) -> list[Block]:
    key, found = IDENTITY.root(salt), []
    for start in range(0, len(tokens), 2):
        pair = (tokens[start], tokens[start + 1])
        parent, key = key, child(key, pair)
        found.append(Block(key, "block", parent, start, pair, bytes([tokens[start]]) * 100))
    return found


def write(store: BlockStore, tokens: list[int], salt: str | None = None) -> None:
    for block in blocks_of(tokens, salt):
        store.write(block)


def contents(store: BlockStore, tokens: list[int], salt: str | None = None) -> list[bytes | None]:
    return [store.read(key) for key in store.find(tokens, salt, len(tokens))]


def test_blocks_are_there_in_the_next_process(tmp_path: Path):
    first = open_store(tmp_path)
    write(first, [1, 2, 3, 4])
    first.close()
    second = open_store(tmp_path)
    assert contents(second, [1, 2, 3, 4]) == [b"\1" * 100, b"\3" * 100]
    assert contents(second, [1, 2, 9, 4]) == [b"\1" * 100]
    assert contents(second, [1, 2, 3]) == [b"\1" * 100]
    second.close()


def test_blocks_of_another_salt_or_identity_are_never_found(tmp_path: Path):
    first = open_store(tmp_path)
    write(first, [1, 2], salt="a")
    first.close()
    second = open_store(tmp_path)
    assert [contents(second, [1, 2], salt) for salt in (None, "", "b")] == [[], [], []]
    assert len(contents(second, [1, 2], "a")) == 1
    second.close()
    other = open_store(tmp_path, replace(IDENTITY, weights="x"))
    assert contents(other, [1, 2], "a") == []
    other.close()


def test_one_process_writes_and_others_read(tmp_path: Path):
    writer, reader = open_store(tmp_path), open_store(tmp_path)
    assert (writer.is_writing, reader.is_writing) == (True, False)
    write(reader, [5, 6])
    write(writer, [1, 2])
    writer.close()
    assert contents(reader, [1, 2]) == [b"\1" * 100]  # found although it was written later
    reader.close()
    third = open_store(tmp_path)
    assert third.is_writing
    assert contents(third, [5, 6]) == []
    third.close()


def test_a_full_disk_ends_writing_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(path: Path, blocks: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module, "write_segment", full)
    store = open_store(tmp_path)
    write(store, [1, 2])
    join(writer_of(store))
    assert not store.is_writing
    write(store, [3, 4])
    assert not store.has(blocks_of([3, 4])[0].key)
    assert store.stats.num_dropped == 1
    store.close()
    lines = [each.message for each in caplog.records if each.levelno == logging.ERROR]
    assert lines == [f"no more blocks are written to {tmp_path}: No space left on device"]


def test_nothing_is_left_of_a_segment_that_could_not_be_written(tmp_path: Path):
    def blocks():
        yield from blocks_of([1, 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_segment(tmp_path / f"a{SUFFIX}", blocks())
    assert [*tmp_path.iterdir()] == []


def test_a_killed_writers_file_is_removed(tmp_path: Path):
    open_store(tmp_path).close()
    left = next(tmp_path.glob("*/")) / "x.123.partial"
    left.write_bytes(MAGIC)
    open_store(tmp_path).close()
    assert not left.exists()


def test_the_segments_used_least_recently_leave_first(tmp_path: Path):
    store = open_store(tmp_path)
    write(store, [1, 2])
    store.close()
    (old,) = tmp_path.rglob(f"*{SUFFIX}")
    os.utime(old, (1, 1))
    size = old.stat().st_size
    store = open_store(tmp_path, max_bytes=2 * size)
    write(store, [3, 4])
    store.close()
    assert old.exists()
    store = open_store(tmp_path, max_bytes=2 * size)
    write(store, [5, 6])
    store.close()
    assert not old.exists()
    assert len([*tmp_path.rglob(f"*{SUFFIX}")]) == 2


def test_reading_keeps_a_segment(tmp_path: Path):
    store = open_store(tmp_path)
    write(store, [1, 2])
    store.close()
    (path,) = tmp_path.rglob(f"*{SUFFIX}")
    os.utime(path, (1, 1))
    store = open_store(tmp_path)
    contents(store, [1, 2])
    store.close()
    assert path.stat().st_mtime > 1


@pytest.mark.parametrize("at", [0, 7, 20, 120, -90, -60, -20, -1])
def test_a_flipped_bit_is_a_miss(tmp_path: Path, at: int):
    store = open_store(tmp_path)
    write(store, [1, 2])
    store.close()
    (path,) = tmp_path.rglob(f"*{SUFFIX}")
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    store = open_store(tmp_path)
    found = contents(store, [1, 2])
    store.close()
    if at == -1:  # padding
        assert found == [b"\1" * 100]
    else:
        assert found in ([], [None])
        assert store.stats.num_damaged == 1


@pytest.mark.parametrize("size", [0, 5, 8, 60, 107, 200, 250])
def test_a_torn_segment_is_refused(tmp_path: Path, size: int):
    path = tmp_path / f"a{SUFFIX}"
    write_segment(path, blocks_of([1, 2]))
    assert read_block(read_index(path)[0]) == b"\1" * 100
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(Damaged):
        read_index(path)


@pytest.mark.parametrize("size", [0, 99, 101])
def test_a_segment_with_a_block_of_another_size_is_refused_whole(tmp_path: Path, size: int):
    right, wrong = blocks_of([1, 2, 3, 4])
    folder = tmp_path / IDENTITY.digest
    open_store(tmp_path).close()
    write_segment(folder / f"a{SUFFIX}", [right, replace(wrong, data=bytes(size))])
    store = open_store(tmp_path)
    assert store.stats.num_damaged == 1
    assert contents(store, [1, 2, 3, 4]) == []
    store.close()


FOOTER = struct.Struct("<QQ16s8s8x")
HEX: list[Any] = ["00", "block", "00", "00"]
INDICES: list[Any] = [
    *(7, [[]], [{"a": 1}], [HEX]),
    *([[*HEX, 8, 101, 0, 1]], [[*HEX, 8, 10**30, 0, 1]], [[*HEX, -1, 9, 0, 1]]),
    *([[*HEX, 50, -1, 0, 1]], [[*HEX, 8, 2.5, 0, 1]], [[*HEX, 8, 9, 0, [1]]]),
]


@pytest.mark.parametrize("index", [b"[" * 200_000, *(json.dumps(x).encode() for x in INDICES)])
def test_an_index_with_a_right_checksum_and_wrong_places_is_refused(tmp_path: Path, index: bytes):
    store = open_store(tmp_path)
    write(store, [1, 2])
    store.close()
    (path,) = tmp_path.rglob(f"*{SUFFIX}")
    data = path.read_bytes()
    at, *_ = FOOTER.unpack(data[-FOOTER.size :])
    path.write_bytes(data[:at] + index + FOOTER.pack(at, len(index), checksum(index), MAGIC))
    with pytest.raises(Damaged, match="the index"):
        read_index(path)
    store = open_store(tmp_path)
    assert contents(store, [1, 2]) == []
    store.close()
    (shelf,) = shelves(tmp_path)
    assert len(shelf.damaged) == 1


def test_a_newer_format_is_refused_by_its_number(tmp_path: Path):
    path = tmp_path / f"a{SUFFIX}"
    write_segment(path, blocks_of([1, 2]))
    data = bytearray(path.read_bytes())
    data[len(MAGIC) - 1] = 9
    path.write_bytes(data)
    with pytest.raises(Damaged, match="format version 9 is not version 2"):
        read_index(path)


def test_a_removed_segment_is_a_miss(tmp_path: Path):
    store = open_store(tmp_path)
    write(store, [1, 2])
    store.close()
    store = open_store(tmp_path)
    for path in tmp_path.rglob(f"*{SUFFIX}"):
        path.unlink()
    assert contents(store, [1, 2]) == [None]
    assert contents(store, [1, 2]) == []
    store.close()


def test_the_folder_is_private(tmp_path: Path):
    folder = tmp_path / "cache"
    open_store(folder).close()
    for path in (folder, *folder.glob("*/")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in folder.rglob("*.*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    folder.chmod(0o777)
    with pytest.raises(CacheError, match="other users may write to it"):
        open_store(folder)


def test_a_folder_is_listed_and_removed(tmp_path: Path):
    store = open_store(tmp_path)
    write(store, [1, 2, 3, 4])
    write(store, [1, 2, 5, 6])
    write(store, [1, 2], salt="a")
    store.close()
    (shelf,) = shelves(tmp_path)
    assert shelf.model == "m"
    assert len(shelf.roots) == 2
    found = sorted([each.token_ids for each in path] for path in shelf.paths)
    assert found == [[(1, 2)], [(1, 2), (3, 4)], [(1, 2), (5, 6)]]
    assert remove_shelf(shelf) == shelf.num_bytes > 0
    assert [*shelves(tmp_path)] == []


def test_a_process_writes_when_the_writer_has_ended(tmp_path: Path):
    writer, reader = open_store(tmp_path), open_store(tmp_path)
    write(writer, [1, 2])
    contents(reader, [1, 2])
    assert not reader.is_writing
    writer.close()
    assert contents(reader, [1, 2]) == [b"\1" * 100]
    assert reader.is_writing
    write(reader, [3, 4])
    reader.close()
    last = open_store(tmp_path)
    assert contents(last, [3, 4]) == [b"\3" * 100]
    last.close()


def test_the_newest_block_of_a_key_counts(tmp_path: Path):
    for value in (b"a", b"b"):
        blocks = [replace(block, data=value * 100) for block in blocks_of([1, 2])]
        store = open_store(tmp_path)
        write_segment(next(tmp_path.glob("*/")) / f"{value.hex()}{SUFFIX}", blocks)
        store.close()
    store = open_store(tmp_path)
    assert contents(store, [1, 2]) == [b"b" * 100]
    store.close()


def test_a_folder_never_has_more_than_the_maximum(tmp_path: Path):
    store = open_store(tmp_path, max_bytes=150)
    write(store, [1, 2, 3, 4])
    store.close()
    assert store.stats.num_dropped == 1
    assert sum(path.stat().st_size for path in tmp_path.rglob(f"*{SUFFIX}")) <= 150


def test_a_reader_takes_no_blocks(tmp_path: Path):
    writer, reader = open_store(tmp_path), open_store(tmp_path)
    write(reader, [1, 2])
    writer.close()
    contents(reader, [1, 2])
    reader.close()
    assert not [*tmp_path.rglob(f"*{SUFFIX}")]


def test_files_of_a_killed_process_are_removed(tmp_path: Path):
    open_store(tmp_path).close()
    left = next(tmp_path.glob("*/")) / "identity.jsonx1"
    left.write_text("{")
    open_store(tmp_path).close()
    assert not left.exists()


def test_a_segment_has_its_name_when_it_is_complete(tmp_path: Path):
    def blocks():
        for block in blocks_of([1, 2, 3, 4]):
            yield block
            assert not [*tmp_path.glob(f"*{SUFFIX}")]

    write_segment(tmp_path / f"a{SUFFIX}", blocks())
    assert len(read_index(tmp_path / f"a{SUFFIX}")) == 2


def test_bytes_behind_the_footer_are_refused(tmp_path: Path):
    path = tmp_path / f"a{SUFFIX}"
    write_segment(path, blocks_of([1, 2]))
    data = path.read_bytes()
    path.write_bytes(data + data[-48:])
    with pytest.raises(Damaged, match="torn"):
        read_index(path)


def test_a_key_with_other_tokens_is_not_found(tmp_path: Path):
    (block,) = blocks_of([1, 2])
    store = open_store(tmp_path)
    store.write(replace(block, token_ids=(3, 4)))
    store.close()
    store = open_store(tmp_path)
    assert contents(store, [1, 2]) == []
    store.close()


def test_blocks_that_begin_alike_have_own_keys(tmp_path: Path):
    store = open_store(tmp_path)
    write(store, [1, 2, 5, 6])
    write(store, [1, 3, 5, 6])
    store.close()
    assert store.stats.num_written == 4
    store = open_store(tmp_path)
    assert len(contents(store, [1, 2, 5, 6])) == len(contents(store, [1, 3, 5, 6])) == 2
    assert contents(store, [5, 6]) == []
    store.close()


def test_a_forked_child_only_reads(tmp_path: Path):
    store = open_store(tmp_path)

    def read_in_child() -> None:
        assert not store.is_writing
        write(store, [1, 2])
        assert contents(store, [1, 2]) == []
        assert not store.is_writing

    assert exit_code_of_child(read_in_child) == 0
    write(store, [1, 2])
    store.close()
    assert store.stats.num_written == 1


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path):
    store = open_store(tmp_path)
    read_end, write_end = os.pipe()
    has_begun, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.write(begin, b".")
        os.read(read_end, 1)  # until the parent is done
        os._exit(0)
    os.read(has_begun, 1)
    for handle in (read_end, has_begun, begin):
        os.close(handle)
    store.close()
    other = open_store(tmp_path)
    is_writing = other.is_writing
    other.close()
    os.close(write_end)
    os.waitpid(child, 0)
    assert is_writing


def test_blocks_without_their_beginning_are_on_no_path(tmp_path: Path):
    blocks = blocks_of([1, 2, 3, 4])
    for block in blocks:
        store = open_store(tmp_path)
        store.write(block)
        store.close()
    sorted(tmp_path.rglob(f"*{SUFFIX}"))[0].unlink()
    (shelf,) = shelves(tmp_path)
    assert [entry.position for entry in shelf.blocks] == [2]
    assert shelf.paths == shelf.roots == []
