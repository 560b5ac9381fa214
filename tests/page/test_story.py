"""The story, the static site and links to moments, in a browser."""

import functools
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import opened

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (360, *(pytest.param(width, marks=pytest.mark.slow) for width in (1280, 2560)))


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A web host that knows nothing of mie."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[str]:
    spec = importlib.util.spec_from_file_location("page_site", ROOT / "docs" / "page_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp("site")
    module.write_site(directory, "https://example.org/")
    handler = functools.partial(Quiet, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


IS_OPEN = (
    "mie.store.run && document.querySelector('[aria-current]') "
    "&& mie.store.step === mie.chapters[{0}].to"
)

pytestmark = pytest.mark.slow  # one browser opens in `make test`: test_page_in_browser.py


def test_the_story_goes_on_by_keys_from_chapter_to_chapter(browser: Any, site: str) -> None:
    with opened(browser, f"{site}/story.html") as shown:
        shown.until("window.mie?.store.run")
        titles = shown.js("mie.chapters.map(({title}) => title)")
        for i, title in enumerate(titles):
            shown.until(IS_OPEN.format(i))
            assert shown.text("title") == f"{i + 1}. {title}"
            assert shown.js("document.querySelectorAll('.cell').length") > 0
            shown.page.keyboard.press("ArrowRight")
        assert shown.text("title").startswith("11. "), "the last chapter stays"
        for number in range(10, 0, -1):
            shown.page.keyboard.press("PageUp")
            shown.until(f"document.getElementById('title').textContent.startsWith('{number}.')")
        assert shown.errors == []


@pytest.mark.slow
def test_a_chapter_moves_by_itself_and_stops_at_its_step(browser: Any, site: str) -> None:
    with opened(browser, f"{site}/story.html#growing", reduced_motion="no-preference") as shown:
        shown.until("window.mie?.store.run")
        seen = shown.js(
            """async () => {
                const seen = new Set();
                while (mie.store.step < 16) {
                    seen.add(mie.store.step);
                    await new Promise(requestAnimationFrame);
                }
                return [...seen];
            }"""
        )
        assert len(seen) > 10
        assert shown.js("mie.store.step") == 16


@pytest.mark.slow  # tests/web/pool.test.js breaks it without a page
def test_the_reader_breaks_the_pool(browser: Any, site: str) -> None:
    with opened(browser, f"{site}/story.html#preemption") as shown:
        shown.until("window.mie?.store.run")
        shown.until(IS_OPEN.format(7))
        step = shown.page.get_by_role("button", name="Step", exact=True)
        said = []
        for _ in range(30):
            step.click()
            said.append(shown.js("document.querySelector('.said').textContent"))
        assert any("it is preempted" in each for each in said)
        shown.js(
            """() => {
                const size = document.querySelector('.pool input');
                size.value = 2;
                size.dispatchEvent(new Event('input'));
            }"""
        )
        for _ in range(8):
            step.click()
            said.append(shown.js("document.querySelector('.said').textContent"))
        assert any("fails" in each for each in said[-8:])
        assert shown.js("document.querySelectorAll('.cell').length") == 2


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(browser: Any, site: str, width: int) -> None:
    for page in ("story.html#whole", "#small-pool/39/seq:2.0"):
        size = {"width": width, "height": 800}
        with opened(browser, f"{site}/{page}", viewport=size) as shown:
            shown.until("window.mie?.store.run")
            shown.drawn()
            assert shown.js("document.documentElement.scrollWidth") <= width
            assert shown.errors == []


WRITTEN = """async step => {
    const written = [];
    const { fillText } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
        if (this.canvas.id === 'timeline') written.push(text);
        fillText.call(this, text, ...place);
    };
    mie.seek(step);
    for (let i = 0; i < 3; i += 1) await new Promise(requestAnimationFrame);
    CanvasRenderingContext2D.prototype.fillText = fillText;
    return written;
}"""


def test_the_number_of_the_step_covers_no_number_of_the_axis(browser: Any, site: str) -> None:
    size = {"width": 360, "height": 800}
    with opened(browser, f"{site}/story.html#whole", viewport=size) as shown:
        shown.until(IS_OPEN.format(10))
        assert {"40", "0", "77"} <= {*shown.js(WRITTEN, 40)}
        near = shown.js(WRITTEN, 70)
        assert "70" in near
        assert "77" not in near


def test_a_link_opens_exactly_there_and_follows_what_is_shown(browser: Any, site: str) -> None:
    with opened(browser, f"{site}/#small-pool/39/seq:2.0") as shown:
        shown.until("window.mie?.store.run")
        assert shown.js("[mie.store.step, mie.store.selected]") == [
            39,
            {"kind": "seq", "id": "2.0"},
        ]
        shown.js("mie.seek(27); mie.select({kind: 'block', id: 3})")
        shown.until("location.hash === '#small-pool/27/block:3'")
        shown.js("location.hash = '#shared-prompt/13'")
        shown.until("mie.store.run.title.startsWith('A shared') && mie.store.step === 13")
        shown.js("location.hash = '#nothing/1'")
        shown.until("document.getElementById('notice').textContent.includes('no run nothing')")


def test_the_preview_and_the_files_are_there(browser: Any, site: str) -> None:
    with opened(browser, f"{site}/story.html") as shown:
        picture = shown.js("document.querySelector('[property=\"og:image\"]').content")
        name = picture.removeprefix("https://example.org/")
        assert shown.js("async name => (await fetch(name)).ok", name)
