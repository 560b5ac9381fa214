"""A small server of the Hugging Face hub's protocol, which serves models from memory.

It knows the routes that ``huggingface_hub`` asks: a model's files with their checksums, and the
files, also from the middle. It can break a download off, damage a file, or refuse a model.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from deadlines import join

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """The models by name, each with its files, and the faults."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    """Files whose last byte is wrong."""
    cut: dict[str, int] = field(default_factory=dict)
    """Files of which only so many bytes arrive."""
    large: int = 1000
    """The size from which a file has a SHA-256."""
    requests: list[str] = field(default_factory=list)
    """"GET /path", and " from N" if the client has the first N bytes."""

    def __enter__(self) -> HubServer:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        join(self._thread)
        self._server.server_close()

    def sha256(self, model: str, name: str) -> str:
        return hashlib.sha256(self.models[model][name]).hexdigest()

    def described(self, model: str, name: str) -> dict[str, Any]:
        data = self.models[model][name]
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        found: dict[str, Any] = {"rfilename": name, "path": name, "type": "file"}
        found |= {"size": len(data), "blobId": git, "oid": git}
        if len(data) >= self.large:
            sha256 = self.sha256(model, name)
            found["lfs"] = {"sha256": sha256, "oid": sha256, "size": len(data), "pointerSize": 134}
        return found


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        start, end = re.findall(r"\d+|$", self.headers.get("Range", "bytes=0-"))[:2]
        part = slice(int(start), int(end) + 1 if end else None)
        self.hub.requests.append(f"{self.command} {path}{f' from {start}' if part.start else ''}")
        asked = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(?:/(.+))?", path
        )
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = asked or file
        if not found or found[1] not in self.hub.models:
            self._send(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
        elif (found[3] if asked else found[2]) not in ("main", COMMIT, None):
            self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        elif asked:
            names = [x for x in self.hub.models[asked[1]] if x.startswith(asked[4] or "")]
            files = [self.hub.described(asked[1], name) for name in names]
            info = files if asked[2] == "tree" else {"id": asked[1], "sha": COMMIT}
            if isinstance(info, dict):
                info["siblings"] = files
            self._send(200, {"Content-Type": "application/json"}, json.dumps(info).encode())
        elif file[1] in self.hub.gated:
            self._send(403, {"X-Error-Code": "GatedRepo"}, b"{}")
        else:
            self._send_file(file[1], file[3], part, is_head)

    def _send_file(self, model: str, name: str, part: slice, is_head: bool) -> None:
        data = self.hub.models[model].get(name)
        if data is None:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")
            return
        described = self.hub.described(model, name)
        etag = described["lfs"]["sha256"] if "lfs" in described else described["oid"]
        if name in self.hub.damaged:
            data = data[:-1] + b"?"
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        rest = data[part]
        if rest != data:
            last = part.start + len(rest) - 1
            headers["Content-Range"] = f"bytes {part.start}-{last}/{len(data)}"
        cut = None
        if name in self.hub.cut and not is_head:
            cut = max(0, self.hub.cut[name] - part.start)
        self._send(206 if rest != data else 200, headers, rest, is_head=is_head, cut=cut)

    def _send(
        self,
        status: int,
        headers: dict[str, str],
        body: bytes,
        *,
        is_head: bool = False,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not is_head and self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None and cut < len(body):
            self.close_connection = True
