"""Take the pictures of the web page for the documentation, and the recording for the README.

    python scripts/page_pictures.py [DIRECTORY]
    python scripts/page_pictures.py --story DIRECTORY

A server runs the bundled model, and a headless Chromium shows its page. The pictures are WebP:
docs/pictures/page/*.webp, or in DIRECTORY. The recording is an animated WebP of 20 seconds, and the
preview of shared links a JPEG, since some programs that show links read no WebP. With ``--story``,
they are PNGs of each chapter in both themes and three widths, to be looked at. Needs playwright and
chromium.
"""

import base64
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_checks.server import serving

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures" / "page"
VIEWS = (
    ("page-1280-dark", "dark", None),
    ("map-1280-light", "light", ".panel.map"),
    ("timeline-1280-light", "light", ".panel.timeline"),
    ("play-1280-light", "light", ".panel.play"),
)
"""Name, theme, and the part of the page, or None for the window."""
PREVIEW_SIZE = {"width": 1200, "height": 630}
SERVER = ("--num-blocks", "48", "--block-size", "8", "--max-num-batched-tokens", "48")
FRAME_SECONDS = 1 / 3
NUM_FRAMES = 60
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--force-color-profile=srgb")

TO_WEBP = """async ([png, width, quality, before]) => {
    const bitmap = async data => createImageBitmap(await (await fetch(data)).blob());
    const image = await bitmap('data:image/png;base64,' + png);
    const scale = Math.min(1, width / image.width);
    const size = [Math.round(image.width * scale), Math.round(image.height * scale)];
    const draw = (source, x, y, w, h) => {
        const canvas = new OffscreenCanvas(w, h);
        const pen = canvas.getContext('2d', {willReadFrequently: true});
        pen.imageSmoothingQuality = 'high';
        pen.drawImage(source, -x, -y, ...size);
        return [canvas, pen.getImageData(0, 0, w, h).data];
    };
    let [canvas, pixels] = draw(image, 0, 0, ...size);
    let box = [0, 0, ...size];
    if (before) {
        const [, old] = draw(await bitmap('data:image/png;base64,' + before), 0, 0, ...size);
        let [left, top, right, bottom] = [size[0], size[1], 0, 0];
        for (let y = 0, i = 0; y < size[1]; y += 1) for (let x = 0; x < size[0]; x += 1, i += 4) {
            if (Math.abs(pixels[i] - old[i]) + Math.abs(pixels[i + 1] - old[i + 1])
                + Math.abs(pixels[i + 2] - old[i + 2]) < 12) continue;
            [left, top] = [Math.min(left, x & ~1), Math.min(top, y & ~1)];
            [right, bottom] = [Math.max(right, x + 1), Math.max(bottom, y + 1)];
        }
        if (right <= left) [left, top, right, bottom] = [0, 0, 2, 2];
        box = [left, top, right - left, bottom - top];
        [canvas] = draw(image, ...box);
    }
    const blob = await canvas.convertToBlob({type: 'image/webp', quality});
    const bytes = new Uint8Array(await blob.arrayBuffer());
    return {size, box, webp: btoa(Array.from(bytes, each => String.fromCharCode(each)).join(''))};
}"""
"""Turn a PNG into a WebP: the whole picture, or the part that differs from the picture before."""

WITHOUT_BARS = """() => {
    for (const bar of document.querySelectorAll('.top, .scrub')) bar.style.position = 'static';
}"""
"""Let the bars at the top and the bottom scroll away, since they would cover a tall view."""


# An animated WebP joins pictures: https://developers.google.com/speed/webp/docs/riff_container

HAS_ANIMATION = 2
NO_BLENDING = 2


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A picture of the part of a frame that has changed."""

    webp: bytes
    size: Sequence[int]
    """Width and height of the whole frame."""
    box: Sequence[int]
    """Left, top, width and height of the part. Left and top are even."""


def animation(frames: Sequence[Frame], milliseconds: int) -> bytes:
    """Return an animated WebP that shows each frame for a time and begins again."""
    width, height = frames[0].size
    canvas = bytes([HAS_ANIMATION, 0, 0, 0]) + _u24(width - 1) + _u24(height - 1)
    parts = [_chunk(b"VP8X", canvas), _chunk(b"ANIM", bytes(6))]
    for frame in frames:
        left, top, w, h = frame.box
        place = _u24(left // 2) + _u24(top // 2) + _u24(w - 1) + _u24(h - 1)
        head = place + _u24(milliseconds) + bytes([NO_BLENDING])
        parts.append(_chunk(b"ANMF", head + b"".join(_pictures(frame.webp))))
    return _chunk(b"RIFF", b"WEBP" + b"".join(parts))


def _pictures(webp: bytes) -> Iterable[bytes]:
    """Yield the chunks of a file that are a picture."""
    at = 12
    while at < len(webp):
        size = int.from_bytes(webp[at + 4 : at + 8], "little")
        end = at + 8 + size + size % 2
        if webp[at : at + 4] in (b"VP8 ", b"VP8L", b"ALPH"):
            yield webp[at:end]
        at = end


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + len(content).to_bytes(4, "little") + content + bytes(len(content) % 2)


def _u24(number: int) -> bytes:
    return number.to_bytes(3, "little")


# The pictures.


class Camera:
    """A page, and the blank page that makes WebP of its pictures."""

    def __init__(self, browser: Any, url: str, height: int, theme: str) -> None:
        size = {"width": 1280, "height": height}
        self.page = browser.new_page(viewport=size, color_scheme=theme)
        self._maker = browser.new_page()
        self._last: str | None = None
        self.page.goto(url)
        self.until("window.mie?.store.run && mie.isWhole()")

    def js(self, source: str) -> Any:
        """Return the value of an expression."""
        return self.page.evaluate(source)

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        pause = "await new Promise(resolve => setTimeout(resolve, 20))"
        self.js(f"async () => {{ while (!({condition})) {pause}; }}")

    def picture(self, selector: str | None, quality: float = 0.82) -> bytes:
        """Return a picture of an element, or of the window."""
        of = self.page.locator(selector).first if selector else self.page
        png = base64.b64encode(of.screenshot()).decode()
        made = self._maker.evaluate(TO_WEBP, [png, 1280, quality, None])
        return base64.b64decode(made["webp"])

    def frame(self, width: int) -> Frame:
        """Return a frame of the window: the part that has changed since the last one."""
        png = base64.b64encode(self.page.screenshot()).decode()
        made = self._maker.evaluate(TO_WEBP, [png, width, 0.5, self._last])
        self._last = png
        return Frame(webp=base64.b64decode(made["webp"]), size=made["size"], box=made["box"])

    def close(self) -> None:
        """Close both pages."""
        self.page.close()
        self._maker.close()


def provoke(camera: Camera) -> None:
    """Run two experiments, and show a step in the middle of a busy time."""
    for name in ("fork", "twelve"):
        camera.js(f"document.querySelector('[data-do={name}]').click()")
        camera.until(f"!document.querySelector('[data-do={name}]').disabled")
    camera.until("mie.truth()?.step === mie.store.run.last")


def show_busy_step(camera: Camera) -> None:
    """Show the last step with a preemption and with hits on the page, and select a request."""
    camera.js(
        """async () => {
            const {run} = mie.store;
            const isBusy = each => each.events.some(event => event.kind === 'preempt');
            const busy = run.steps.findLast(each => isBusy(each) && run.isExact(each.step))
                ?? run.steps.at(-1);
            mie.seek(busy.step);
            const state = await mie.at(busy.step);
            const [name] = Object.keys(state.tables);
            mie.select({kind: 'seq', id: name}, true);
        }"""
    )
    camera.page.wait_for_timeout(1500)


def take_pictures(browser: Any, url: str, folder: Path) -> None:
    """Take every view."""
    for name, theme, selector in VIEWS:
        camera = Camera(browser, url, 860, theme)
        provoke(camera)
        show_busy_step(camera)
        if selector:
            camera.js(WITHOUT_BARS)
        (folder / f"{name}.webp").write_bytes(camera.picture(selector))
        if selector is None:
            camera.js("mie.select(null)")
            camera.page.set_viewport_size(PREVIEW_SIZE)
            camera.page.wait_for_timeout(500)
            camera.page.screenshot(path=folder / "preview.jpg", type="jpeg", quality=82)
        camera.close()


def record(browser: Any, url: str, folder: Path) -> None:
    """Record 20 seconds: the way through all steps of two experiments, and back to a preemption."""
    camera = Camera(browser, url, 800, "dark")
    provoke(camera)
    first, last = camera.js("[mie.store.run.first, mie.store.run.last]")
    moves = NUM_FRAMES * 3 // 4
    frames = []
    for index in range(NUM_FRAMES):
        if index < moves:
            step = first + round((last - first) * index / (moves - 1))
            camera.js(f"mie.at({step}).then(() => mie.seek({step}))")
        elif index == moves:
            show_busy_step(camera)
        elif index > moves + 8:
            camera.page.keyboard.press("ArrowLeft")
        camera.page.wait_for_timeout(1100)  # until the text of the blocks has come
        frames.append(camera.frame(800))
    (folder / "recording.webp").write_bytes(animation(frames, round(FRAME_SECONDS * 1000)))
    camera.close()


STORY_SIZES = ((360, 780), (1280, 860), (3840, 2100))
IS_AT_END = """async number => {
    while (!window.mie?.store?.run || !document.querySelector('[aria-current]')
        || mie.store.step !== mie.chapters[number].to) await new Promise(requestAnimationFrame);
}"""


def tell(browser: Any, url: str, folder: Path) -> None:
    """Take each chapter of the story at its end."""
    for width, height in STORY_SIZES:
        for theme in ("light", "dark"):
            size = {"width": width, "height": height}
            page = browser.new_page(viewport=size, color_scheme=theme, reduced_motion="reduce")
            page.goto(f"{url}/story.html")
            page.wait_for_function("window.mie?.chapters")
            for number in range(page.evaluate("mie.chapters.length")):
                page.evaluate(IS_AT_END, number)
                page.wait_for_timeout(300)  # until it is drawn
                name = f"story-{width}-{theme}-{number + 1:02d}.png"
                page.screenshot(path=folder / name, full_page=True)
                page.keyboard.press("PageDown")
            page.close()


def main(arguments: Sequence[str]) -> None:
    """Take all pictures."""
    from playwright.sync_api import sync_playwright

    is_story = "--story" in arguments
    names = [each for each in arguments if each != "--story"]
    if is_story and not names:
        raise SystemExit("--story needs a directory for its pictures")
    folder = Path(names[0]) if names else PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.NamedTemporaryFile() as log,
        serving(Path(log.name), SERVER, key="") as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=[*FLAGS])
        if is_story:
            tell(browser, server.url, folder)
        else:
            record(browser, server.url, folder)
            take_pictures(browser, server.url, folder)
        browser.close()
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    print("\n".join(f"{name}: {size / 1000:,.0f} kB" for name, size in sizes.items()))
    print(f"{len(sizes)} files, {sum(sizes.values()) / 1000:,.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
