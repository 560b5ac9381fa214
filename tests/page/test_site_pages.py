"""Every page of the site opens, links to places that exist, and fits on a phone and a wide screen.

`make site` builds the site. These tests run where MIE_SITE names the folder, as in the nightly job.
They serve it below a path, as a host of several sites does.
"""

from __future__ import annotations

import functools
import http.server
import itertools
import os
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from browser import opened, serious

SITE = os.environ.get("MIE_SITE", "")
WIDTHS = (360, 768, 1280, 1920)
OVERFLOW = """async () => {
    if (window.mie?.store) for (let i = 0; i < 2; i += 1) await new Promise(requestAnimationFrame);
    return document.scrollingElement.scrollWidth - window.innerWidth;
}"""
"""How many pixels a page is too wide. A page with canvases draws them again after a new size."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SITE, reason="MIE_SITE names no site (make site builds one)"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


KINDS = (
    *("index.html", "docs/story/story.html", "docs/story/index.html", "docs/index.html"),
    *("docs/tutorial/step_3.html", "docs/api/index.html", "docs/source/mie/sched/result.py.html"),
)
"""A page of each kind."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    folder = Path(SITE).resolve()
    handler = functools.partial(Quiet, directory=str(folder.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/{folder.name}/"
        server.shutdown()
        thread.join(60)


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def pages() -> dict[str, Links]:
    root = Path(SITE)
    return {
        path.relative_to(root).as_posix(): Links(path.read_text(encoding="utf-8"))
        for path in sorted(root.rglob("*.html"))
    }


def test_every_link_of_the_site_leads_to_a_place() -> None:
    found, root = pages(), Path(SITE).resolve()
    assert len(found) > 50
    lost = []
    for page, links in found.items():
        for link in links.links:
            target = urlsplit(urljoin(f"http://site/{page}", link))
            if target.netloc != "site" or target.scheme != "http":
                continue
            place = unquote(target.path).lstrip("/")
            path = root / place
            if path.is_dir():
                place, path = f"{place.rstrip('/')}/index.html".lstrip("/"), path / "index.html"
            anchor = unquote(target.fragment)
            other = found.get(place)
            if not path.is_file() or (anchor and other and anchor not in other.anchors):
                lost.append(f"{page}: {link}")
    assert lost == []


def test_code_in_docstrings_is_shown_as_code() -> None:
    """An indented paragraph is a quotation, unless the one before ends with two colons."""
    texts = {path: path.read_text(encoding="utf-8") for path in Path(SITE).glob("docs/api/*.html")}
    assert texts
    assert [path.name for path, text in texts.items() if "<blockquote" in text] == []


def test_every_page_of_the_site_opens_and_fits(browser: Any, url: str) -> None:
    wrong = []

    def look(request: Any) -> None:
        if not request.url.startswith((url, "data:", "blob:")):
            wrong.append(f"{shown.page.url} needs {request.url}")

    with opened(browser, url) as shown:
        shown.page.on("request", look)
        for page in pages():
            shown.page.goto(url + page)
            shown.until(
                "!window.mie?.store || mie.store.run"
            )  # the story and the viewer read a run
            for width, scheme in itertools.product(WIDTHS, ("light", "dark")):
                shown.page.emulate_media(color_scheme=scheme)
                shown.page.set_viewport_size({"width": width, "height": 900})
                if (overflow := shown.js(OVERFLOW)) > 0:
                    wrong.append(f"{page} at {width}, {scheme}: {overflow} pixels too wide")
        assert wrong == []
        assert shown.errors == []


def test_a_plot_follows_the_button_that_sets_the_theme(browser: Any, url: str) -> None:
    with opened(browser, f"{url}docs/book/README.html", color_scheme="light") as shown:
        for theme in ("dark", "light"):
            shown.js("theme => { document.body.dataset.theme = theme; }", theme)
            scheme = "getComputedStyle(document.querySelector('article img')).colorScheme"
            assert shown.js(scheme) == theme


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_a_page_of_each_kind(
    browser: Any, url: str, scheme: str
) -> None:
    options = {"viewport": {"width": 360, "height": 780}, "color_scheme": scheme}
    for page in KINDS:
        with opened(browser, url + page, **options) as shown:
            shown.until("!window.mie?.store || mie.store.run")
            assert (page, serious(shown, scheme)) == (page, [])
