"""Move results and commands between ranks through memory that they share.

Every exchange has the same two parts. Each rank writes its part of an array, and waits until every
other rank has done so. Then each reads the whole array. Exchanges take turns between two halves of
the memory: a rank that writes to a half again has waited in between, and so has every rank that
read the half before.

A rank waits on a semaphore for each other rank. It wakes up now and then to check whether the
others still run.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.errors import WorkerError
from mie.ops.arrays import Bools, Floats
from mie.ranks.share import Share

HALF_BYTES = 4 << 20
"""Default size of a half. Longer arrays are exchanged in pieces."""
SILENCE = 300.0
"""Seconds after which a rank that neither answers nor ends is an error."""
SLICE, IDLE_SLICE = 0.05, 0.25
"""Seconds after which a waiting rank checks whether the others still run, in a step or idle."""
PAUSE = 0.001
"""Seconds between two looks at a word of the shared memory."""
SHORT_PAUSE = 5e-5
"""Seconds between two looks at a GPU that computes a step."""

_ROUND, _JOINED, _FIRST_ACK = range(3)  # words at the beginning; an acknowledgement a rank follows
_SEMAPHORES, _SEMAPHORE_BYTES = 4096, 64  # POSIX's sem_t takes 32 bytes
_PAGE = 4096


class Abandoned(Exception):
    """Rank 0 has given up the command that this rank runs."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Exchange:
    """The shared memory of the ranks of an engine, as one of them uses it.

    Rank 0 gives commands, and each of the others receives them in a loop. All then take part in the
    same exchanges. An exception in rank 0 may interrupt a command at any line: its next command
    first makes the others abandon the old command.
    """

    def __init__(self, memory: mmap.mmap, share: Share, check: Callable[[], object]) -> None:
        """Use memory of `memory_bytes`. ``check`` raises if a rank has ended."""
        self.share = share
        self._memory, self._check = memory, check
        self._half_bytes = (len(memory) - _first_half(share.num_ranks)) // 2
        self._words: NDArray[np.int64] = np.frombuffer(memory, np.int64, _PAGE // 8)
        self._base = np.frombuffer(memory, np.uint8).ctypes.data
        self._others = [rank for rank in range(share.num_ranks) if rank != share.rank]
        self._library = ctypes.CDLL(None, use_errno=True)
        quick = ctypes.CDLL(None)  # copies no errno
        self._post, self._try = quick.sem_post, quick.sem_trywait
        self._count = 0
        self._round = 0
        self.is_clean = True
        """Whether the last command ended in this rank, without an exception."""
        self._patience = math.inf  # the others load their parts before the first command
        self._pid = os.getpid()
        mine = share.rank
        self._posted = [self._semaphore(other, mine) for other in self._others]
        self._awaited = [self._semaphore(mine, other) for other in self._others]

    def set_up(self) -> None:
        """Initialise the semaphores, before another rank uses the memory."""
        for semaphore in self._all_semaphores():
            if self._library.sem_init(semaphore, 1, 0):
                raise OSError(ctypes.get_errno(), "sem_init failed")

    # Arrays.

    def gather(
        self, out: Floats, x: Floats, added: Floats | None = None, own: range | None = None
    ) -> None:
        """Fill out [T, N] with the parts [T, N / ranks] of all ranks, and add ``added`` [T, N].

        ``own`` are the rank's columns, by default `Share.part`. Ranks may have equal columns.
        """
        own = own or self.share.part(out.shape[-1])
        for rows, whole in self._pieces(out):
            whole[:, own.start : own.stop] = x[rows]
            self._await_others()
            if added is None:
                out[rows] = whole
            else:
                np.add(whole, added[rows], out=out[rows])

    def collect(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks. All have the same length."""
        width = max(1, min(len(data), _PAGE))
        x: Any = np.zeros((-(-len(data) // width), width), np.uint8)
        x.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
        out: Any = np.empty((len(x), self.share.num_ranks * width), np.uint8)
        self.gather(out, x)
        parts = np.split(out, self.share.num_ranks, axis=1)
        return [part.tobytes()[: len(data)] for part in parts]

    def pick(self, out: Floats, x: Floats, is_own: Bools) -> None:
        """Fill out [T, N] with rows of x [T, N], each from the rank where ``is_own`` [T] is set."""
        for rows, whole in self._pieces(out):
            mine = is_own[rows]
            whole[mine] = x[rows][mine]
            self._await_others()
            out[rows] = whole

    def _pieces(self, out: Floats) -> Iterator[tuple[slice, Floats]]:
        """Yield rows of an array [T, N], and shared memory for them."""
        width = out.shape[-1]
        size = self._half_bytes // (width * out.itemsize)
        assert size, "a half has room for a row"
        for begin in range(0, len(out), size):
            end = min(begin + size, len(out))
            half = self._next_half((end - begin) * width, out.dtype)
            yield slice(begin, end), half.reshape(end - begin, width)

    def _next_half(self, number: int, dtype: DTypeLike) -> NDArray[Any]:
        self._count += 1
        start = _first_half(self.share.num_ranks) + self._count % 2 * self._half_bytes
        return np.frombuffer(self._memory, dtype, number, start)

    # Commands.

    @contextmanager
    def command(self, name: str, *arguments: object) -> Iterator[None]:
        """Run a command in the other ranks, while the body runs it in this rank.

        Raises:
            WorkerError: a rank has ended or is silent, or this process is a fork.
        """
        if self.is_clean:
            self._check_here()
        else:
            self.start_over()
        self.is_clean = False
        self._send(pickle.dumps((name, arguments), pickle.HIGHEST_PROTOCOL))
        yield
        self.is_clean, self._patience = True, SILENCE

    def _check_here(self) -> None:
        if os.getpid() != self._pid:
            raise WorkerError(
                "this process was forked after the model was loaded on several ranks, which "
                "belong to its parent (load the model after the fork)"
            )
        self._check()

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next command and return it."""
        message = bytearray(self._received(_PAGE, is_idle=True))
        size = int.from_bytes(message[:8], "little")
        while len(message) < 8 + size:
            message += self._received(8 + size - len(message))
        name, arguments = pickle.loads(message[8 : 8 + size])
        return name, arguments

    def _send(self, data: bytes) -> None:
        """Send a message: its length in 8 bytes, and the data. The first piece is a page."""
        view, most = memoryview(len(data).to_bytes(8, "little") + data), _PAGE
        while view:
            piece, view = view[:most], view[most:]
            self._next_half(len(piece), np.uint8)[:] = np.frombuffer(piece, np.uint8)
            self._await_others()
            most = self._half_bytes

    def _received(self, most: int, *, is_idle: bool = False) -> bytes:
        size = min(most, self._half_bytes)
        half = self._next_half(size, np.uint8)
        self._await_others(is_idle=is_idle)
        return half.tobytes()

    # Waiting.

    def _await_others(self, *, is_idle: bool = False) -> None:
        """Wait until every rank has written its part. Only rank 0 loses its patience."""
        for semaphore in self._posted:
            self._post(semaphore)
        deadline = time.monotonic() + self._patience
        for other, semaphore in zip(self._others, self._awaited, strict=True):
            if self._try(semaphore) == 0:
                continue
            while not self._is_posted(semaphore, IDLE_SLICE if is_idle else SLICE):
                self.look()
                if time.monotonic() > deadline:
                    raise _silent(other, self.share.num_ranks)

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait for work that the ranks do together, until ``is_done`` returns true.

        Raises:
            Abandoned: rank 0 has given up the command.
            WorkerError: a rank has ended, or in rank 0, it is silent.
        """
        begin = time.monotonic()
        next_look = begin + SLICE
        while not is_done():
            now = time.monotonic()
            if now >= next_look:
                next_look = now + SLICE
                self.look()
                if now > begin + self._patience:
                    raise WorkerError(
                        f"the {self.share.num_ranks} ranks did not finish an exchange for "
                        f"{SILENCE:.0f} s (end the process, and load the model again)"
                    )
            time.sleep(SHORT_PAUSE)

    def look(self) -> None:
        """Raise as `wait` does, if the command cannot go on."""
        if self._words[_ROUND] != self._round:
            raise Abandoned
        self._check()

    def expect(self, seconds: float) -> None:
        """Wait so many seconds for a reason to raise as `wait` does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            time.sleep(PAUSE)

    def _is_posted(self, semaphore: ctypes.c_void_p, at_most: float) -> bool:
        """Wait for a semaphore so many seconds at most, and return whether it was posted."""
        seconds, part = divmod(time.time() + at_most, 1)
        until = _Time(int(seconds), int(part * 1e9))
        if self._library.sem_timedwait(semaphore, ctypes.byref(until)) == 0:
            return True
        number = ctypes.get_errno()
        if number not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(number, "sem_timedwait failed")
        return False

    def start_over(self, leave: Callable[[], None] = lambda: None) -> None:
        """Make the other ranks abandon the command that an exception has interrupted here.

        ``leave`` is called when they can notice this. It ends exchanges that are not in this
        memory.
        """
        self._check_here()
        self._round = int(self._words[_ROUND]) + 1
        self._words[_ROUND] = self._round
        leave()
        deadline = time.monotonic() + SILENCE
        for other in self._others:
            while self._words[_FIRST_ACK + other] != self._round:
                self._check()
                if time.monotonic() > deadline:
                    raise _silent(other, self.share.num_ranks)
                time.sleep(PAUSE)
        for semaphore in self._all_semaphores():  # no rank uses them now
            while self._try(semaphore) == 0:
                pass
        self._count = 0
        self._words[_JOINED] = self._round
        self.is_clean = True

    def rejoin(self) -> None:
        """Join the others again after `Abandoned`."""
        while self._words[_JOINED] != self._words[_ROUND]:
            time.sleep(PAUSE)
            self._check()
            self._round = int(self._words[_ROUND])
            self._words[_FIRST_ACK + self.share.rank] = self._round
        self._count = 0

    def _all_semaphores(self) -> Iterator[ctypes.c_void_p]:
        ranks = range(self.share.num_ranks)
        return (self._semaphore(one, other) for one in ranks for other in ranks)

    def _semaphore(self, waiting: int, other: int) -> ctypes.c_void_p:
        """Return the address of the semaphore on which a rank waits for another."""
        place = waiting * self.share.num_ranks + other
        return ctypes.c_void_p(self._base + _SEMAPHORES + place * _SEMAPHORE_BYTES)


def memory_bytes(num_ranks: int, widest: int) -> int:
    """Return the size of the memory of so many ranks, with room for rows of ``widest`` bytes."""
    half = max(HALF_BYTES, -(-widest // _PAGE) * _PAGE)
    return _first_half(num_ranks) + 2 * half


def _first_half(num_ranks: int) -> int:
    """Return where the first half begins: after a page of words, and the semaphores."""
    size = _SEMAPHORES + num_ranks * num_ranks * _SEMAPHORE_BYTES
    return -(-size // _PAGE) * _PAGE


def _silent(rank: int, num_ranks: int) -> WorkerError:
    return WorkerError(
        f"rank {rank} of {num_ranks} neither ended nor answered for {SILENCE:.0f} s (end the "
        "process, and load the model again)"
    )
