"""A server that runs out of file descriptors: by connections, and by anything else."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from deadlines import PATIENCE

from mie.base.resources import raise_open_files
from mie.base.worker import Worker
from mie.errors import WorkerError
from mie.serve import listener as listeners
from mie.serve.errors import api_error
from mie.serve.listener import Listener

LIMIT = 200
PROGRAM = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT // 2}, {LIMIT}))
from mie.cli import main
main(["serve", "--port", "0", "--num-blocks", "64", "--num-threads", "1", "--backend", "numpy"])
"""
BODY = json.dumps({"prompt": "Once", "max_tokens": 2, "structured_outputs": {"choice": ["a"]}})


@contextmanager
def served(log: str) -> Iterator[tuple[str, int]]:
    """Run a server with few file descriptors, and return its address."""
    with open(log, "wb") as stderr:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=stderr)
    try:
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(r"listening on (\S+)\]", read(log))):
            assert process.poll() is None, read(log)
            assert time.monotonic() < deadline, read(log)
            time.sleep(0.05)
        url = urlsplit(found[1])
        yield str(url.hostname), int(url.port or 0)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def ask(connection: HTTPConnection) -> int:
    connection.request("POST", "/v1/completions", BODY, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_idle_connections_take_no_descriptor_that_the_server_needs(tmp_path) -> None:
    log = str(tmp_path / "log")
    start = time.monotonic()
    with served(log) as address, ExitStack() as stack:
        first = HTTPConnection(*address, timeout=PATIENCE)
        first.connect()
        idle, refused = [], 0
        for _ in range(LIMIT):
            client = stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
            idle.append(client)
        late = HTTPConnection(*address, timeout=PATIENCE)
        assert ask(late) == 503  # after the answers to all that came before
        late.close()
        for client in idle:
            client.settimeout(0.0)
            with suppress(BlockingIOError):
                told = client.recv(1 << 16)
                assert told.startswith(b"HTTP/1.1 503 "), told
                assert b"retry-after: 1\r\n" in told
                assert (
                    "too many connections"
                    in json.loads(told.partition(b"\r\n\r\n")[2])["error"]["message"]
                )
                refused += 1
        assert LIMIT // 4 < refused < LIMIT
        # The connection that came before is served. This starts a worker.
        assert ask(first) == 200
        for client in idle:
            client.close()
        deadline = time.monotonic() + PATIENCE
        first.close()
        status = 0
        while status != 200:
            assert time.monotonic() < deadline
            later = HTTPConnection(*address, timeout=PATIENCE)
            status = ask(later)
            later.close()
    lines = [line for line in read(log).splitlines() if "refused" in line]
    assert 1 <= len(lines) <= time.monotonic() - start + 1
    assert "Traceback" not in read(log)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_a_failed_attempt_to_accept_is_one_line(monkeypatch, caplog, code):
    """A system that has nothing left is told once, and asked again after a rest."""
    import asyncio

    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.02)
    monkeypatch.setattr(listeners, "REST_SECONDS", 0.01)
    attempts = []
    accept = socket.socket.accept

    def fails(self):
        attempts.append(self)
        if len(attempts) == 1:
            raise OSError(code, os.strerror(code))
        return accept(self)

    loop = asyncio.get_running_loop()
    with Listener(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.watch(loop)
        server = await asyncio.start_server(lambda reader, writer: writer.close(), sock=listener)
        monkeypatch.setattr(socket.socket, "accept", fails)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b""
        writer.close()
        server.close()
        await server.wait_closed()
    assert len([each for each in attempts if each is listener]) < 10
    assert [record.exc_info for record in caplog.records] == [None]
    assert "1 connections refused" in caplog.text


def test_refusals_are_counted_in_one_line_a_second(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(listeners.time, "monotonic", lambda: now[0])
    with Listener() as listener:
        for step in range(5000):
            now[0] = 100 + step / 1000
            listener.report("because")
    lines = [record.message for record in caplog.records]
    assert len(lines) == 5
    assert lines[1] == "1000 connections refused: because"


@contextmanager
def with_files_left(count: int) -> Iterator[None]:
    """Leave this process ``count`` file descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = os.dup(0)
    os.close(top)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + 16, hard))
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", range(9))
def test_a_worker_starts_or_is_refused_with_a_reason(count):
    before = len(os.listdir("/proc/self/fd"))
    refusal = None
    with with_files_left(count):
        try:
            Worker("mie.text.render_worker", ["jinja2"], 1, 1 << 27).end()
        except WorkerError as error:
            refusal = error
    if refusal is not None:
        assert "cannot be started" in str(refusal)
        assert api_error(refusal).status == 503
    assert (refusal is not None) == (count < 2) or 2 <= count < 8
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_files_left_is_a_503_for_any_route():
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert api_error(error).status == 503
    assert api_error(OSError(errno.EIO, "no")).status == 500


def test_the_limit_of_open_files_is_raised_as_far_as_it_may():
    program = """
import resource
from mie.base.resources import MOST_FILES, raise_open_files
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (50, min(300, hard)))
print(raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE), raise_open_files())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE)
    assert done.stdout.split() == [b"300"] * 4
    assert raise_open_files() >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]
