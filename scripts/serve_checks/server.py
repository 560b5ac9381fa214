"""A server in a separate process, as an operator starts it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

KEY = "right-key"
START_SECONDS = 300
STOP_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """A server that answers, and the file with its log."""

    url: str
    key: str
    process_id: int
    log: Path

    def resident_kib(self) -> int:
        """Return the memory of the server's process that is in RAM, in KiB."""
        for line in Path(f"/proc/{self.process_id}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise RuntimeError(f"process {self.process_id} has no VmRSS")

    def metric(self, name: str) -> float:
        """Return the sum of a metric's series.

        Raises:
            KeyError: there is no such metric.
        """
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        answer = httpx2.get(f"{self.url}/metrics", headers=headers, timeout=60)
        text = answer.raise_for_status().text
        values = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.partition("{")[0].partition(" ")[0] == name
        ]
        if not values:
            raise KeyError(name)
        return sum(values)

    def complaints(self) -> list[str]:
        """Return the lines of the log that look like a bug of the server."""
        marks = ("Traceback", "Exception", "Error:", " ERROR ", "mie: error")
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if any(mark in line for mark in marks)]


@contextmanager
def serving(log: Path, options: Sequence[str] = (), *, key: str = KEY) -> Iterator[RunningServer]:
    """Start ``mie serve`` on a free port, and end it with SIGTERM.

    Raises:
        RuntimeError: it does not answer within five minutes, or does not end with exit code 0.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mie", "serve", "--port", str(port), *options]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "MIE_API_KEY": key}
        )
    server = RunningServer(url=f"http://127.0.0.1:{port}", key=key, process_id=process.pid, log=log)
    try:
        _wait_until_it_answers(server, process)
        yield server
        process.send_signal(signal.SIGTERM)
        code = process.wait(STOP_SECONDS)
        if code != 0:
            raise RuntimeError(f"the server ended with exit code {code}; its log is {log}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait_until_it_answers(server: RunningServer, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx2.get(f"{server.url}/health").status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.05)
    log = server.log.read_text(errors="replace")
    raise RuntimeError(f"the server did not start:\n{log[-2000:]}")
