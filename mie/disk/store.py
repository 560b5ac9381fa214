"""Keep blocks in a folder of segments, up to a limit of bytes."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mie.base.cache_dir import CacheError, private_folder, write_json
from mie.base.threads import after_fork
from mie.disk.identity import Identity, child
from mie.disk.segment import SUFFIX, Block, Damaged, Entry, read_block, read_index, write_segment

logger = logging.getLogger(__name__)

IDENTITY = "identity.json"
"""The file with the facts that the blocks of a folder depend on."""

SEGMENT_BYTES = 32 << 20
"""Bytes of blocks after which a segment is written."""
QUEUE_BYTES = 128 << 20
"""Bytes of blocks that may wait to be written. Blocks beyond them are dropped, and counted."""
WAIT_SECONDS = 0.5
"""Time after which waiting blocks are written although a segment is not full."""
TOUCH_SECONDS = 60
"""A segment is marked as used again after this time at the earliest."""
TICK_NS = 1_000_000_000
"""Nanoseconds after which a file system shows that a folder has changed again."""


@dataclass(slots=True)
class DiskStats:
    """Numbers of blocks since the store was opened."""

    num_read: int = 0
    num_written: int = 0
    num_damaged: int = 0
    """Number of blocks and segments that were not used because they were damaged."""
    num_dropped: int = 0
    """Number of blocks that were not written, because the writer was behind or had stopped."""


class BlockStore:
    """The blocks of one `Identity` in a folder. Several processes may share the folder.

    The first process that opens the folder writes, and the others read. Reads happen in the
    caller's thread, writes in a thread of the store.
    """

    def __init__(
        self, folder: Path, identity: Identity, *, max_bytes: int, model: Mapping[str, Any]
    ) -> None:
        """Open or make the folder. ``model`` has facts about the model, for `mie cache`.

        Raises:
            CacheError: other users may write to the folder, or it cannot be made.
        """
        self.identity, self.stats = identity, DiskStats()
        self._root, self._folder = folder, folder / identity.digest
        self._max_bytes = max_bytes
        private_folder(folder)
        private_folder(self._folder)
        self._entries: dict[bytes, Entry] = {}
        self._segments: dict[Path, float] = {}  # with the time of the last mark
        self._scanned = 0
        self._lock = threading.Lock()  # of the entries and the queue
        self._ready = threading.Condition(self._lock)
        self._queue: list[Block] = []
        self._queued: set[bytes] = set()
        self._queue_bytes = 0
        self._is_closed = False
        self._writer: threading.Thread | None = None
        self._lock_file: int | None = None
        self._model = model
        self._scan()
        self._start_writing()
        if self._writer is None:
            logger.info("another process writes to %s, so this process only reads", folder)

    def _start_writing(self) -> None:
        """Become the process that writes, unless another process writes."""
        self._lock_file = _lock(self._root)
        if self._lock_file is None:
            return
        for pattern in ("*.partial", f"{IDENTITY}?*"):  # of a process that was killed
            for partial in self._root.glob(f"*/{pattern}"):
                with suppress(OSError):
                    partial.unlink()
        _describe(self._folder, self.identity, self._model)
        self._writer = threading.Thread(target=self._write_all, name="mie-disk", daemon=True)
        self._writer.start()
        after_fork(self._leave_to_parent)

    # Reading.

    def find(self, token_ids: Sequence[int], salt: str | None, limit: int) -> list[bytes]:
        """Return the keys of the longest path of full blocks of at most ``limit`` tokens."""
        self._refresh()
        size, key, keys = self.identity.block_size, self.identity.root(salt), []
        for start in range(0, limit - size + 1, size):
            tokens = tuple(token_ids[start : start + size])
            key = child(key, tokens)
            entry = self._entries.get(key)
            if entry is None or entry.token_ids != tokens:
                break
            keys.append(key)
        return keys

    def read(self, key: bytes) -> bytes | None:
        """Return the bytes of a content, or None if they are damaged or gone."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        try:
            data = read_block(entry)
        except FileNotFoundError:  # another process removed the segment
            self._forget(entry.segment)
            return None
        except (OSError, Damaged) as error:
            self.stats.num_damaged += 1
            logger.warning("a block of %s is not used: %s", entry.segment, error)
            with self._lock:
                self._entries.pop(key, None)
            return None
        self.stats.num_read += 1
        self._mark(entry.segment)
        return data

    def has_written(self, key: bytes) -> bool:
        """Return whether a content can be read."""
        return key in self._entries

    def size_of(self, key: bytes) -> int:
        """Return the number of bytes of a content that can be read."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.size

    def _refresh(self) -> None:
        """Find the segments that another process has written, and write if it has ended."""
        if self._writer is None and not self._is_closed:
            self._scan()
            self._start_writing()

    def _scan(self) -> None:
        """Take in the new segments, the oldest first, so that the newest block of a key counts."""
        try:
            changed = os.stat(self._folder).st_mtime_ns
            if changed == self._scanned:
                return
            # Files that are renamed within one tick of the clock leave one time.
            self._scanned = changed if time.time_ns() - changed > TICK_NS else 0
            for path in sorted(self._folder.glob(f"*{SUFFIX}")):
                if path not in self._segments:
                    self._segments[path] = 0.0
                    self._take_in(path)
        except OSError as error:
            logger.warning("the folder %s cannot be read: %s", self._folder, error)

    def _take_in(self, path: Path) -> None:
        try:
            entries = read_index(path)
            self._check_sizes(entries)
        except FileNotFoundError:
            return
        except (OSError, Damaged) as error:
            self.stats.num_damaged += 1
            logger.warning("the segment %s is not used: %s", path, error)
            return
        with self._lock:
            self._entries.update({entry.key: entry for entry in entries})

    def _check_sizes(self, entries: Sequence[Entry]) -> None:
        """Raise `Damaged` if a block has too few or too many bytes."""
        size = self.identity.block_bytes
        for entry in entries:
            if entry.part == "block" and entry.size != size:
                raise Damaged(
                    f"the block at byte {entry.offset:,} has {entry.size:,} bytes instead of "
                    f"{size:,}"
                )

    def _forget(self, segment: Path) -> None:
        with self._lock:
            gone = [key for key, entry in self._entries.items() if entry.segment == segment]
            for key in gone:
                del self._entries[key]
            self._segments.pop(segment, None)

    def _mark(self, segment: Path) -> None:
        """Mark a segment as used, so that it leaves later than others."""
        now = time.time()
        if now - self._segments.get(segment, 0.0) > TOUCH_SECONDS:
            self._segments[segment] = now
            with suppress(OSError):
                os.utime(segment)

    # Writing.

    @property
    def is_writing(self) -> bool:
        """Whether this process writes blocks."""
        return self._writer is not None and not self._is_closed

    def has(self, key: bytes) -> bool:
        """Return whether a block is written or about to be written."""
        return key in self._entries or key in self._queued

    def write(self, block: Block) -> None:
        """Queue a block for the thread that writes. A block that is there already is ignored."""
        with self._lock:
            if not self.is_writing or self.has(block.key):
                return
            if self._queue_bytes + len(block.data) > min(QUEUE_BYTES, self._max_bytes):
                self.stats.num_dropped += 1
                return
            self._queue.append(block)
            self._queued.add(block.key)
            self._queue_bytes += len(block.data)
            if self._queue_bytes >= SEGMENT_BYTES:
                self._ready.notify()

    def close(self, timeout: float = 30.0) -> None:
        """Write the blocks that wait, and leave writing to another process."""
        with self._lock:
            self._is_closed = True
            self._ready.notify()
        if self._writer is not None:
            self._writer.join(timeout)
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _leave_to_parent(self) -> None:
        """Only read in a forked child. The parent goes on to write."""
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        if self._lock_file is not None:
            os.close(self._lock_file)  # or the lock would outlive the parent
        self._is_closed, self._writer, self._lock_file = True, None, None

    def _write_all(self) -> None:
        while True:
            with self._lock:
                if not self._is_closed:
                    self._ready.wait(WAIT_SECONDS)
                blocks, self._queue, self._queue_bytes = self._queue, [], 0
                is_last = self._is_closed
            if blocks:
                try:
                    self._write(blocks)
                except OSError as error:
                    self._stop_writing(error, len(blocks))
                    return
            if is_last:
                return

    def _write(self, blocks: list[Block]) -> None:
        self._make_room(sum(len(block.data) for block in blocks))
        path = self._folder / f"{time.time_ns():x}-{os.getpid():x}{SUFFIX}"
        entries = write_segment(path, blocks)
        with self._lock:
            self._segments[path] = time.time()
            self._entries.update({entry.key: entry for entry in entries})
            self._queued.difference_update([block.key for block in blocks])
        self._make_room(0)  # the index has bytes too
        self.stats.num_written += len(blocks)

    def _make_room(self, size: int) -> None:
        """Remove the segments of any identity that were used least recently."""
        found = []
        for path in self._root.glob(f"*/*{SUFFIX}"):
            with suppress(OSError):
                about = path.stat()
                found.append((about.st_mtime, about.st_size, path))
        total = sum(size for _, size, _ in found) + size
        for _, num_bytes, path in sorted(found):
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            self._forget(path)
            total -= num_bytes

    def _stop_writing(self, error: OSError, count: int) -> None:
        with self._lock:
            self._is_closed = True
            self.stats.num_dropped += count + len(self._queue)
            self._queue, self._queued = [], set()
        logger.error("no more blocks are written to %s: %s", self._root, error.strerror)


def _lock(folder: Path) -> int | None:
    """Return a handle that holds the folder's lock, or None if another process holds it."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _describe(folder: Path, identity: Identity, model: Mapping[str, Any]) -> None:
    with suppress(CacheError):  # blocks are read without it
        write_json(folder / IDENTITY, {**model, **asdict(identity)})
