"""Read requests and set limits inside a worker process of `mie.base.worker`.

A message is its length in 8 bytes and its data. The kernel kills the process with SIGPROF when it
exceeds its CPU time.
"""

import os
import resource
import signal

SOCKET = 0


def read_message() -> bytes | None:
    """Return the next request, or None if the socket is closed."""
    header = _read(8)
    return None if header is None else _read(int.from_bytes(header, "big"))


def write_message(data: bytes) -> None:
    """Send a reply."""
    view = memoryview(len(data).to_bytes(8, "big") + data)
    while view:
        view = view[os.write(SOCKET, view) :]


def limit_cpu_seconds(seconds: float) -> None:
    """Set the CPU time in seconds after which the kernel kills the process; 0: no limit."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_address_space(num_bytes: int) -> None:
    """Limit the address space, and forbid files, processes and core dumps."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))


def address_space() -> int:
    """Return the size of the address space in bytes."""
    return _num_pages(0) * resource.getpagesize()


def resident_bytes() -> int:
    """Return the size of the memory that is in use."""
    return _num_pages(1) * resource.getpagesize()


def _num_pages(column: int) -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[column])


def _read(count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        more = os.read(SOCKET, min(count - len(data), 1 << 20))
        if not more:
            return None
        data += more
    return bytes(data)
