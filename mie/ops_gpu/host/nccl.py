"""Stand in for `cupy.cuda.nccl` in the emulator, between processes or threads of one machine.

The part of the module that `mie.ops_gpu.gathers` uses is here. Where NCCL trusts its callers, this
checks them: buffers must be as large as a call says, and all ranks must make the same calls in the
same order. Bytes go through sockets to rank 0, and from there to all.
"""

import hashlib
import secrets
import socket
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
"""Bytes of an element of each of NCCL's data types (nccl.h)."""
ID_BYTES = 128
"""The length of an id (NCCL_UNIQUE_ID_BYTES)."""
SECONDS = 300.0
"""Seconds for which a rank waits for another."""

_HEADER = struct.Struct("<qqqq")  # rank, number of the call, count, data type


class NcclError(RuntimeError):
    """A call failed, as in CuPy."""


class Address(int):
    """The address of an array, with the array to check accesses."""

    array: NDArray[Any]

    def __new__(cls, array: NDArray[Any]) -> "Address":
        """Return the address of a contiguous array."""
        address = super().__new__(cls, array.ctypes.data)
        address.array = array
        return address

    def raw(self, num_bytes: int, what: str, *, is_written: bool = False) -> NDArray[np.uint8]:
        """Return the first bytes of the array, or raise `NcclError` if it has fewer."""
        array = self.array
        if not array.flags.c_contiguous or (is_written and not array.flags.writeable):
            raise NcclError(f"{what} is not contiguous, or not writeable")
        if array.nbytes < num_bytes:
            raise NcclError(f"{what} has {array.nbytes} bytes; the call needs {num_bytes}")
        return array.reshape(-1).view(np.uint8)[:num_bytes]


class EmulatedNccl:
    """The module. Each call of a communicator becomes a task of ``submit``."""

    NCCL_INT8 = 0

    def __init__(self, submit: Callable[[Callable[[], None]], None], stream: int = 0) -> None:
        """Take calls that name the address ``stream``."""
        self.submit, self.stream = submit, stream
        self.listeners: dict[bytes, socket.socket] = {}
        weakref.finalize(self, _close, self.listeners)
        self.NcclCommunicator = partial(EmulatedCommunicator, self)

    def get_version(self) -> int:
        """Return the version, as NCCL codes 2.20.5."""
        return 22005

    def get_unique_id(self) -> bytes:
        """Return an id, at which the first rank listens from now on. Earlier ids are void."""
        _close(self.listeners)
        unique_id = secrets.token_bytes(ID_BYTES)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(_name(unique_id))
        listener.listen()
        self.listeners[unique_id] = listener
        return unique_id


class EmulatedCommunicator:
    """A rank among others, each in a process or a thread."""

    def __init__(self, nccl: EmulatedNccl, ndev: int, commId: bytes, rank: int) -> None:
        """Join the other ranks. Rank 0 must be in the process that made the id."""
        if len(commId) != ID_BYTES or not 0 <= rank < ndev:
            raise NcclError(f"rank {rank} of {ndev}, with an id of {len(commId)} bytes")
        self._nccl, self._num_ranks, self._rank = nccl, ndev, rank
        self._count = 0
        self._error: NcclError | None = None
        self._peers: dict[int, socket.socket] = {}
        weakref.finalize(self, _close, self._peers)
        try:
            if rank:
                self._peers[0] = socket.socket(socket.AF_UNIX)
                self._peers[0].settimeout(SECONDS)
                self._peers[0].connect(_name(commId))
                self._peers[0].sendall(commId + bytes([rank]))
            else:
                self._accept(commId)
        except OSError as error:
            raise self._failed(f"the ranks did not meet: {error}") from error

    def _accept(self, unique_id: bytes) -> None:
        with self._nccl.listeners.pop(unique_id) as listener:
            listener.settimeout(SECONDS)
            while len(self._peers) < self._num_ranks - 1:
                peer, _ = listener.accept()
                peer.settimeout(SECONDS)
                greeting = received(peer, ID_BYTES + 1)
                rank = greeting[-1]
                is_new = 0 < rank < self._num_ranks and rank not in self._peers
                if greeting[:-1] != unique_id or not is_new:
                    raise NcclError(f"rank {rank} of {self._num_ranks} comes twice, or by mistake")
                self._peers[rank] = peer

    def allGather(
        self, sendbuf: Address, recvbuf: Address, count: int, datatype: int, stream: int
    ) -> None:
        """Queue a gather of ``count`` elements of each rank."""
        if stream != self._nccl.stream:
            raise NcclError(f"stream {stream} is not the backend's stream {self._nccl.stream}")
        if datatype not in SIZES or count < 0:
            raise NcclError(f"{count} elements of data type {datatype}")
        size = count * SIZES[datatype]
        mine = sendbuf.raw(size, "sendbuf")
        whole = recvbuf.raw(size * self._num_ranks, "recvbuf", is_written=True)
        place = int(recvbuf) + self._rank * size
        if np.shares_memory(mine, whole) and int(sendbuf) != place:
            raise NcclError("sendbuf is in recvbuf, and not in the place of its rank")
        self._nccl.submit(partial(self._gather, mine, whole, count, datatype))

    def _gather(
        self, mine: NDArray[np.uint8], whole: NDArray[np.uint8], count: int, datatype: int
    ) -> None:
        self.check_async_error()
        self._count += 1
        call = self._count, count, datatype
        parts = whole.reshape(self._num_ranks, -1)
        try:
            if self._rank:
                self._peers[0].sendall(_HEADER.pack(self._rank, *call) + mine.tobytes())
                whole[:] = np.frombuffer(received(self._peers[0], whole.size), np.uint8)
                return
            parts[0] = mine
            for rank, peer in sorted(self._peers.items()):
                theirs = _HEADER.unpack(received(peer, _HEADER.size))
                if theirs != (rank, *call):
                    raise self._failed(
                        f"rank {rank} calls (number, count, data type) {theirs[1:]}, and rank 0 "
                        f"calls {call}"
                    )
                parts[rank] = np.frombuffer(received(peer, mine.size), np.uint8)
            for peer in self._peers.values():
                peer.sendall(whole.tobytes())
        except OSError as error:
            raise self._failed(f"call {self._count} of rank {self._rank}: {error}") from error

    def check_async_error(self) -> None:
        """Raise the error of an earlier call, if there is one."""
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """End the communicator. Calls of the other ranks fail."""
        _close(self._peers)
        self._error = self._error or NcclError("the communicator was aborted")

    def _failed(self, reason: str) -> NcclError:
        self._error = NcclError(reason)
        self.abort()
        return self._error


def _close(sockets: dict[Any, socket.socket]) -> None:
    """Close sockets, also under threads that wait for them."""
    while sockets:
        _, each = sockets.popitem()
        with suppress(OSError):  # nobody is at the other end
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def _name(unique_id: bytes) -> str:
    """Return the name of a socket. It is not the id, because users can list names."""
    return f"\0mie-nccl-{hashlib.sha256(unique_id).hexdigest()}"


def received(peer: socket.socket, count: int) -> bytes:
    """Return the next bytes that another rank sends."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = peer.recv_into(view)
        if not got:
            raise ConnectionError("another rank has ended, or has aborted")
        view = view[got:]
    return bytes(data)
