"""Write the story, the viewer and the recorded runs, and the front page of the site.

    python docs/page_site.py [DIRECTORY]

``make site`` writes build/site, a folder for any web host. The front page leads to the story in
docs/story, beside the documentation, where Sphinx puts both (docs/conf.py). With the address at
which the folder is published, such as ADDRESS=https://example.org/mie/, links to it get a preview
picture.
"""

from __future__ import annotations

import html
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from mie.page.assets import RECORDED_RUNS, assets

PREVIEW = Path(__file__).parent / "pictures" / "page" / "page-1280-dark.webp"
PAGES = ("index.html", "story.html")
STORY = "docs/story/"
FRONT: Mapping[str, str] = MappingProxyType(
    {
        "The story of a KV cache": f"{STORY}story.html",
        "The viewer, with recorded runs": STORY,
        "Build an engine in six steps": "docs/tutorial/README.html",
        "The book of benchmarks": "docs/book/README.html",
        "The scoreboard": "docs/scoreboard.html",
        "The documentation": "docs/index.html",
    }
)
"""The links of the front page. It opens the first of them by itself."""


def write_site(directory: Path, address: str = "", documentation: str = "") -> None:
    """Write the story and the viewer. They need no server beyond one that sends files.

    Their pages link to the address ``documentation``, if there is one.
    """
    files = {f"mie/page/{name}": asset.content for name, asset in assets().items()}
    del files["mie/page/chat.html"]  # a chat needs an engine
    runs = [{"name": run.name, "title": run.title} for run in RECORDED_RUNS]
    files["mie/config"] = json.dumps({"mode": "static", "runs": runs}).encode()
    picture = html.escape(f"{address}{PREVIEW.name}")
    link = f'<a class="button" href="{html.escape(documentation)}">Documentation</a>'
    for name in PAGES:
        page = files.pop(f"mie/page/{name}").decode()
        head = f'<meta property="og:image" content="{picture}">\n</head>'
        page = page.replace("</head>", head, 1)
        if documentation:
            page = page.replace('<div class="tools">', f'<div class="tools">\n    {link}', 1)
        files[name] = page.encode()
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    shutil.copy(PREVIEW, directory)


def write_front(directory: Path) -> None:
    """Write the front page."""
    first = next(iter(FRONT.values()))
    items = "".join(f'<li><a href="{at}">{html.escape(title)}</a>\n' for title, at in FRONT.items())
    page = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>mie</title>\n'
        f'<link rel="icon" href="{STORY}mie/page/icon.svg">\n'
        f'<meta http-equiv="refresh" content="0; url={first}">\n<ul>\n{items}</ul>\n</html>\n'
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "index.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    write_front(Path(sys.argv[1] if len(sys.argv) > 1 else "build/site"))
