"""Sphinx extension: pages link to files of the repository, which the site shows with colours.

In Markdown a link to ``../mie/frontend/llm.py`` works on every host of the repository. In the site
it leads to a page ``source/mie/frontend/llm.py.html``. If the text of the link is the name of a
function, it leads to the function's line. A link to a folder becomes plain text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\[(?:[^\[\]]|\[[^\]]*\])*\])\((\.\.?/[^)#\s]+)(#[^)\s]*)?\)")


def mark_links(app: Sphinx, docname: str, source: list[str]) -> None:
    """Mark the links that leave docs/ as links to files, since MyST takes some for pages."""
    folder = Path(app.env.doc2path(docname)).parent

    def marked(match: re.Match[str]) -> str:
        text, target = match[1], (folder / match[2]).resolve()
        if target.is_relative_to(app.srcdir) or not target.exists():
            return match[0]
        return f"{text}(path:{match[2]})" if target.is_file() else text[1:-1]

    source[0] = LINK.sub(marked, source[0])


def link_to_sources(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Turn downloads of Python and other source files into links to their pages."""
    for node in list(doctree.findall(download_reference)):
        file = (Path(app.env.doc2path(docname)).parent / node["reftarget"]).resolve()
        if not file.is_relative_to(ROOT) or file.suffix in {".json", ".png"}:
            continue
        name = f"source/{file.relative_to(ROOT).as_posix()}"
        linked_sources(app).add(name)
        uri = app.builder.get_relative_uri(docname, name) + line_anchor(file, node.astext())
        node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def line_anchor(file: Path, name: str) -> str:
    """Return "#line-7" for a name that line 7 of a Python file defines, and "" for others."""
    body = ast.parse(file.read_text()).body if file.suffix == ".py" else []
    line = 0
    for part in name.split("."):
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            names = [getattr(t, "name", getattr(t, "id", None)) for t in targets]
            if isinstance(node, ast.AnnAssign):
                names = [getattr(node.target, "id", None)]
            if part in names:
                line, body = node.lineno, getattr(node, "body", [])
                break
        else:
            return ""
    return f"#line-{line}"


def linked_sources(app: Sphinx) -> set[str]:
    """Return the names of the pages that are linked to."""
    if not hasattr(app.env, "linked_sources"):
        app.env.linked_sources = set()  # type: ignore[attr-defined]
    sources: set[str] = app.env.linked_sources  # type: ignore[attr-defined]
    return sources


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for each of the linked files."""
    languages = {".py": "python", ".md": "markdown", ".cu": "cuda", ".cuh": "cuda"}
    for name in sorted(linked_sources(app)):
        path = name.removeprefix("source/")
        file = ROOT / path
        code = app.builder.highlighter.highlight_block(  # type: ignore[attr-defined]
            file.read_text(), languages.get(file.suffix, "text"), lineanchors="line"
        )
        # A line is a place, and no link: a reader with keys would stop at each.
        code = re.sub(r'<a id="(line-\d+)"[^>]*></a>', r'<span id="\1"></span>', code)
        yield name, {"title": path, "body": f"<h1>{path}</h1>{code}"}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", mark_links)
    app.connect("doctree-resolved", link_to_sources)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
