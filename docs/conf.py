"""Configuration of the documentation site; `make docs` builds it, and warnings are errors."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

import mie

sys.path.insert(0, str(Path(__file__).parent))  # for source_pages and page_site

from page_site import STORY, write_site

project = "mie"
author = copyright = "mie contributors"
release = version = mie.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "source_pages"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
pygments_dark_style = "github-dark"  # the theme's default underlines names, as if they were links
html_favicon = "../mie/page/web/icon.svg"
html_title = f"mie {release}"
myst_heading_anchors = 6  # links to headings, with GitHub's names

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "undoc-members": True, "inherited-members": False}
default_role = "code"


def refuse_missing_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Warn, and so fail the build, when a public class, function or property has no docstring."""
    if what != "attribute" and not any(lines):
        logging.getLogger(__name__).warning("%s %s has no docstring", what, name)


def mark_parameters(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Turn paragraphs of "name: meaning" into fields that Sphinx lists as parameters."""
    paragraphs = "\n".join(lines).split("\n\n")
    for i, paragraph in enumerate(paragraphs):
        starts = [line for line in paragraph.splitlines() if not line.startswith(" ")]
        if all(re.match(r"[a-z_0-9]+: \S", line) for line in starts):
            paragraphs[i] = re.sub(r"^([a-z_0-9]+):", r":param \1:", paragraph, flags=re.MULTILINE)
    lines[:] = "\n\n".join(paragraphs).splitlines()


def add_story(app: Sphinx, exception: Exception | None) -> None:
    """Write the story and the viewer into the site, to which the front page leads."""
    if exception is None and app.builder.format == "html":
        address = os.environ.get("ADDRESS", "")
        write_site(Path(app.outdir) / "story", address and f"{address}{STORY}", "../index.html")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", refuse_missing_docstring)
    app.connect("autodoc-process-docstring", mark_parameters)
    app.connect("build-finished", add_story)
