"""Join the page's modules and styles into one HTML file, which opens from a disk.

A file that was opened from a disk may not import modules, so each module becomes a function that
returns its exports. Modules keep to a form that makes this a matter of lines: imports stand alone,
and exports are functions, classes and constants at their declarations.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from posixpath import dirname, join, normpath

from mie.events.page.assets import assets

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
