"""Write the front page of the site, and the story and the viewer with the recorded runs.

    python docs/page_site.py [DIRECTORY]

``make site`` writes build/site, a folder for any web host. The front page leads to the story in
docs/story, beside the documentation, where Sphinx puts both (docs/conf.py). With the address at
which the folder is published, such as ADDRESS=https://example.org/mie/, links to it get a preview
picture.
"""

from __future__ import annotations

import html
import json
import os
import shutil
import sys
from pathlib import Path

from mie.page.assets import RECORDED_RUNS, assets

DOCS = Path(__file__).parent
PREVIEW = DOCS / "pictures" / "page" / "preview.jpg"
PAGES = ("index.html", "story.html")
STORY = "docs/story/"


def with_preview(page: str, address: str) -> str:
    """Return a page whose links get a preview picture, which is at an address."""
    picture = html.escape(f"{address}{PREVIEW.name}")
    head = (
        f'<meta property="og:image" content="{picture}">\n'
        '<meta name="twitter:card" content="summary_large_image">\n</head>'
    )
    return page.replace("</head>", head, 1)


def write_site(directory: Path, address: str = "", documentation: str = "") -> None:
    """Write the story and the viewer. They need no server beyond one that sends files.

    Their pages link to the address ``documentation``, if there is one.
    """
    files = {f"mie/page/{name}": asset.content for name, asset in assets().items()}
    del files["mie/page/chat.html"]  # a chat needs an engine
    runs = [{"name": run.name, "title": run.title} for run in RECORDED_RUNS]
    files["mie/config"] = json.dumps({"mode": "static", "runs": runs}).encode()
    link = f'<a class="button" href="{html.escape(documentation)}">Documentation</a>'
    for name in PAGES:
        page = with_preview(files.pop(f"mie/page/{name}").decode(), address)
        if documentation:
            page = page.replace('<div class="tools">', f'<div class="tools">\n    {link}', 1)
        files[name] = page.encode()
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    shutil.copy(PREVIEW, directory)


def write_front(directory: Path, address: str = "") -> None:
    """Write the front page."""
    front = (DOCS / "front.html").read_text(encoding="utf-8")
    directory.mkdir(parents=True, exist_ok=True)
    page = with_preview(front, f"{address}{STORY}")
    (directory / "index.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    destination = Path(sys.argv[1] if len(sys.argv) > 1 else "build/site")
    write_front(destination, os.environ.get("ADDRESS", ""))
