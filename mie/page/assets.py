"""The files of the page, as a server sends them, or joined into one HTML file.

A file that was opened from a disk may not import modules, so each module becomes a function that
returns its exports. Modules keep to a form that allows joining by lines: imports are separate
lines, and exports are functions, classes and constants at their declarations.
"""

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from posixpath import dirname, join, normpath

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
    ".jsonl": "application/x-ndjson",
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
    RecordedRun(name="guesses", title="Drafts, some of them kept"),
)


def assets() -> dict[str, Asset]:
    """Return the files of the page by their paths, and the recorded runs as ``runs/NAME``."""
    runs = {
        f"runs/{run.name}.page.jsonl": Asset(
            content=gzip.decompress(run.compressed()),
            compressed=run.compressed(),
            media_type=TYPES[".jsonl"],
        )
        for run in RECORDED_RUNS
    }
    files = {
        path.relative_to(WEB).as_posix(): Asset(
            content=path.read_bytes(),
            compressed=gzip.compress(path.read_bytes(), mtime=0),
            media_type=TYPES[path.suffix],
        )
        for path in sorted(WEB.rglob("*"))
        if path.suffix in TYPES
    }
    return files | runs


MAIN = "main.js"
_IMPORT = re.compile(r'^import\s+\{([^}]*)\}\s+from\s+"(\.[^"]+)";\s*$', re.MULTILINE)
_EXPORT = re.compile(r"^export\s+((?:async\s+)?function\*?|const|class)\s+([\w$]+)", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)
_STYLE = re.compile(r'<link rel="?stylesheet"? href="mie/page/([^"]+)">')
_SCRIPT = re.compile(r'<script type="module" src="mie/page/main\.js"></script>')
_CHARSET = '<meta charset="utf-8">'
_ICON = re.compile(r'(<link rel="icon"[^>]*href=")mie/page/([^"]+)(")')


@dataclass(frozen=True, kw_only=True)
class EmbeddedRun:
    """A recorded run for a file: its records, compressed with gzip."""

    name: str
    title: str
    gzip: bytes


def page_html(runs: Iterable[EmbeddedRun]) -> str:
    """Return the page with everything inside that it needs."""
    files = {name: asset.content.decode() for name, asset in assets().items()}
    script = bundle(files)
    styles: list[str] = []

    def style(match: re.Match[str]) -> str:
        styles.append(files[match[1]])
        return f"<style>{styles[-1]}</style>"

    def icon(match: re.Match[str]) -> str:
        content = base64.b64encode(files[match[2]].encode()).decode()
        return f"{match[1]}data:image/svg+xml;base64,{content}{match[3]}"

    page = _ICON.sub(icon, _STYLE.sub(style, files["index.html"]))
    # The meta element must come before the scripts and styles that it allows by their digests.
    csp = (
        f"default-src 'none'; script-src {_digest(script)}; "
        f"style-src {' '.join(map(_digest, styles))}; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(csp)}">'
    page = page.replace(_CHARSET, f"{_CHARSET}\n{meta}", 1)
    data = json.dumps(
        [
            {"name": r.name, "title": r.title, "gzip": base64.b64encode(r.gzip).decode()}
            for r in runs
        ]
    ).replace("<", "\\u003c")
    body = (
        f'<script type="application/json" id="mie-runs">{data}</script>\n'
        f'<script type="module">{script}</script>'
    )
    found, count = _SCRIPT.subn(lambda _: body, page)
    assert count == 1, "index.html has one module"
    return found


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bundle(files: Mapping[str, str]) -> str:
    """Return one script that has the effect of `MAIN`.

    Raises:
        ValueError: a module is missing, imports itself, or has a statement of another form.
    """
    names: dict[str, str] = {}  # path -> variable, in the order of evaluation
    parts: list[str] = []

    def add(path: str, above: tuple[str, ...]) -> str:
        """Return the variable that holds the exports of a module."""
        if path in above:
            raise ValueError(f"{path} imports itself, over {' and '.join(above)}")
        if path not in names:
            if path not in files:
                raise ValueError(f"{above[-1]} imports {path}, which is not there")

            def imported(match: re.Match[str]) -> str:
                module = add(normpath(join(dirname(path), match[2])), (*above, path))
                return f"const {{{match[1].replace(' as ', ': ')}}} = {module};"

            text = _IMPORT.sub(imported, files[path])
            exported = ", ".join(match[2] for match in _EXPORT.finditer(text))
            text = _EXPORT.sub(r"\1 \2", text)
            left = _LEFT.search(text)
            if left is not None:
                raise ValueError(f"{path} has a statement that cannot be joined: {left[0]}")
            names[path] = f"module{len(names)}"
            body = f"{text.rstrip()}\nreturn {{{exported}}};\n"
            parts.append(f"const {names[path]} = (() => {{\n{body}}})();\n")
        return names[path]

    add(MAIN, ())
    script = "".join(parts)
    if "</script" in script.lower():
        raise ValueError("a module contains </script, which would end the element around it")
    return script
