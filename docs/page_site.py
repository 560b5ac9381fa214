"""Write the story, the viewer and the recorded runs as a folder that any web host serves.

    python docs/page_site.py [DIRECTORY] [ADDRESS]

``make site`` writes build/site. With the address at which the folder is published, such as
https://example.org/mie/, links to it get a preview picture.
"""

from __future__ import annotations

import html
import json
import shutil
import sys
from pathlib import Path

from mie.page.assets import RECORDED_RUNS, assets

PREVIEW = Path(__file__).parent / "pictures" / "page" / "page-1280-dark.webp"
PAGES = ("index.html", "story.html")


def write_site(directory: Path, address: str = "") -> None:
    """Write the site. It needs no server beyond one that sends files."""
    files = {f"mie/page/{name}": asset.content for name, asset in assets().items()}
    runs = [{"name": run.name, "title": run.title} for run in RECORDED_RUNS]
    files["mie/config"] = json.dumps({"mode": "static", "runs": runs}).encode()
    picture = html.escape(f"{address}{PREVIEW.name}")
    for name in PAGES:
        head = f'<meta property="og:image" content="{picture}">\n</head>'
        files[name] = files.pop(f"mie/page/{name}").replace(b"</head>", head.encode(), 1)
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    shutil.copy(PREVIEW, directory)


if __name__ == "__main__":
    write_site(Path(sys.argv[1] if len(sys.argv) > 1 else "build/site"), *sys.argv[2:3])
