"""The files of the page, as a server sends them."""

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

WEB = Path(__file__).parent / "web"
"""The folder of the page's own files."""
RUNS = Path(__file__).parent / "runs"
"""The folder of the recorded runs."""

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""The files that are sent, by their endings. Others in the folder are not."""


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A file of the page."""

    content: bytes
    compressed: bytes
    """The same, compressed with gzip."""
    media_type: str

    @property
    def etag(self) -> str:
        """A tag that differs between versions of the file."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'


def assets() -> dict[str, Asset]:
    """Return the files of the page by their paths below the folder."""
    return {
        path.relative_to(WEB).as_posix(): Asset(
            content=path.read_bytes(),
            compressed=gzip.compress(path.read_bytes(), mtime=0),
            media_type=TYPES[path.suffix],
        )
        for path in sorted(WEB.rglob("*"))
        if path.suffix in TYPES
    }


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run that comes with mie."""

    name: str
    title: str

    def compressed(self) -> bytes:
        """Return its records, one a line, compressed with gzip."""
        return (RUNS / f"{self.name}.page.jsonl.gz").read_bytes()


RECORDED_RUNS = (
    RecordedRun(name="shared-prompt", title="A shared system prompt and 12 requests"),
    RecordedRun(name="small-pool", title="A pool that is too small"),
)
