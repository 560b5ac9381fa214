"""The server behind nginx with the configuration of docs/serving.md, and its systemd unit."""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from deadlines import PATIENCE
from stepped import Stepped
from test_disconnect import stepped_server

from mie.serve.config import ServeConfig

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
PROMPT = list(range(100, 164))

MAIN = """
{user}
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {servers}
}}
"""


def block_of(heading: str) -> str:
    """The first block of code of a section of the page."""
    section = TEXT[TEXT.index(f"\n## {heading}\n") :]
    lines = section[section.index("\n    ") + 1 :].splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("    "))
    return "\n".join(line[4:] for line in lines[:end])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Proxy:
    """A running nginx, and how to reach it."""

    def __init__(self, port: int, certificate: str) -> None:
        self._port = port
        self._context = ssl.create_default_context(cafile=certificate)

    def ask(self, path: str, data: bytes) -> socket.socket:
        """Send a request, and return the connection."""
        raw = socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE)
        connection = self._context.wrap_socket(raw, server_hostname="127.0.0.1")
        head = (
            f"POST {path} HTTP/1.1\r\nHost: llm.example.org\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        piece = connection.recv(4096)
        assert piece, data
        data += piece
    return data


def rest_of(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(4096):
        data += piece
    connection.close()
    return data


@contextmanager
def nginx(folder: Path, url: str, certificate: list[str]) -> Iterator[Proxy]:
    """Run nginx with the page's configuration in front of a server."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    servers = block_of("Behind nginx")
    for old, new in (
        ("127.0.0.1:8000", url.removeprefix("http://")),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/llm.pem", certificate[0]),
        ("/etc/ssl/llm.key", certificate[1]),
    ):
        assert old in servers
        servers = servers.replace(old, new)
    file = folder / "nginx.conf"
    user = "" if os.getuid() else "user root;"  # or its worker could not write to the folder
    file.write_text(MAIN.format(user=user, folder=folder, servers=servers))
    process = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(file)])
    try:
        end = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None, (folder / "error.log").read_text()
            assert time.monotonic() < end, "nginx does not listen"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.01)
        yield Proxy(port, certificate[0])
    finally:
        process.terminate()
        process.wait(PATIENCE)


@contextmanager
def behind_nginx(folder: Path, certificate: list[str]) -> Iterator[tuple[Stepped, Proxy]]:
    named = ServeConfig(allowed_hosts=["llm.example.org"])
    with stepped_server(named) as (stepped, url), nginx(folder, url, certificate) as proxy:
        yield stepped, proxy


def body(**more: object) -> bytes:
    return json.dumps({"prompt": PROMPT, "ignore_eos": True, "max_tokens": 200, **more}).encode()


def test_tokens_pass_nginx_before_the_next_step(tmp_path, certificate):
    with behind_nginx(tmp_path, certificate) as (stepped, proxy):
        stream = proxy.ask("/llm/v1/completions", body(stream=True, max_tokens=3))
        for _ in range(3):
            stepped.hold()  # the engine computes nothing while the client reads
            if stepped.engine.requests[0].sequences[0].num_generated:
                break
            stepped.step()
        head = read_until(stream, b'"text"')
        assert b"text/event-stream" in head
        stepped.free()
        assert b"data: [DONE]" in rest_of(stream)


def test_errors_and_large_bodies_pass_nginx(tmp_path, certificate):
    with behind_nginx(tmp_path, certificate) as (stepped, proxy):
        stepped.free()
        refused = rest_of(proxy.ask("/llm/v1/completions", b'{"prompt": ""}'))
        assert b"400 Bad Request" in refused
        assert b"prompt is empty" in refused
        large = b'{"prompt": "Once", "max_tokens": 1' + b" " * 2_000_000 + b"}"
        assert b'"choices"' in rest_of(proxy.ask("/llm/v1/completions", large))
        assert b"404 Not Found" in rest_of(proxy.ask("/v1/completions", body()))


def test_systemd_takes_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = block_of("As a systemd service")
    program = "/opt/mie/bin/mie"
    assert program in unit
    file = tmp_path / "mie.service"
    file.write_text(unit.replace(program, sys.executable) + "\n")
    command = ["systemd-analyze", "verify", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (result.returncode, result.stderr) == (0, "")
