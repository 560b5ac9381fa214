"""Record a terminal session, from `pip install` to the answer of a GGUF file, as a moving SVG.

    python scripts/record_terminal.py          # needs pyte, a terminal emulator

The session is real: bash on a pseudo-terminal, a fresh virtual environment, and this tree's wheel,
where pip is made to find it, quietly. The hub is the tests' stand-in, on this machine, and has one
model: the bundled one, as a GGUF file. Pauses longer than a second are cut. The result is
docs/pictures/terminal.svg.
"""

import fcntl
import os
import pty
import select
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from subprocess import run

import pyte

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gguf_files import convert
from hub_server import HubServer

from mie.checkpoint.locate import BUNDLED_DIRECTORY

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/pictures/terminal.svg"
NAME = "stories/tiny-GGUF"
COMMANDS = (
    "pip install '.[all]'",
    f"mie pull {NAME}:Q8_0",
    f'mie run {NAME} "Tell me a story about Mia the otter, the mill and a bell."',
)
COLUMNS, ROWS = 80, 18
KEY_SECONDS, PAUSE_SECONDS, END_SECONDS = 0.04, 1.0, 5.0
PATIENCE = 600.0

CELL, LINE, MARGIN = 8.4, 18, 12
"""Pixels: the width and the height of a character, and the border."""
PAPER, INK = "#1b2430", "#d9e0e8"
COLORS = {
    "default": INK,
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": "#79c0ff",
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "white": "#ffffff",
}

Run = tuple[int, str, str, bool]
"""Characters of a row that look the same: the column, the text, the color, and whether bold."""
Frame = tuple[float, list[tuple[Run, ...]]]
"""The seconds at which the screen changed, and its rows."""


def record(environment: dict[str, str], folder: Path) -> list[Frame]:
    """Type the commands into a shell, and return the screens."""
    process, terminal = pty.fork()
    if not process:
        size = struct.pack("HHHH", ROWS, COLUMNS, 0, 0)  # without it, bars have no room
        fcntl.ioctl(sys.stdout, termios.TIOCSWINSZ, size)
        os.chdir(folder)
        os.execvpe("bash", ["bash", "--norc", "--noprofile"], environment)
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    frames: list[Frame] = []
    now, last = 0.0, time.monotonic()

    def follow(seconds: float) -> None:
        """Read for a time, or until the shell waits for a command."""
        nonlocal now, last
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([terminal], [], [], left)[0]:
                continue
            stream.feed(os.read(terminal, 65536))
            now += min(time.monotonic() - last, PAUSE_SECONDS)
            last = time.monotonic()
            frames.append((now, rows_of(screen)))
            if seconds == PATIENCE and screen.display[screen.cursor.y].rstrip() == "$":
                return
        assert seconds < PATIENCE, screen.display

    follow(PATIENCE)
    for command in COMMANDS:
        for key in command:
            os.write(terminal, key.encode())
            follow(KEY_SECONDS)
        os.write(terminal, b"\n")
        follow(KEY_SECONDS)
        follow(PATIENCE)
    os.write(terminal, b"exit\n")
    os.waitpid(process, 0)
    return frames


def rows_of(screen: pyte.Screen) -> list[tuple[Run, ...]]:
    """Return the rows of the screen, each as its runs."""
    return [tuple(runs_of(screen.buffer[y])) for y in range(ROWS)]


def runs_of(row: dict[int, pyte.screens.Char]) -> Iterator[Run]:
    """Yield the runs of a row, without spaces at its end."""
    begun: list[pyte.screens.Char] = []
    for x in range(COLUMNS + 1):
        cell = row[x] if x < COLUMNS else None
        if begun and (cell is None or (cell.fg, cell.bold) != (begun[0].fg, begun[0].bold)):
            text = "".join(each.data for each in begun)
            if text.strip():
                color = COLORS.get(begun[0].fg, f"#{begun[0].fg}")
                yield x - len(begun), text.rstrip(), color, begun[0].bold
            begun = []
        if cell is not None:
            begun.append(cell)


def draw(frames: list[Frame]) -> str:
    """Return the session as SVG. Without animation it shows the last screen."""
    total = frames[-1][0] + END_SECONDS
    spans: dict[tuple[float, float | None], list[str]] = {}
    for y in range(ROWS):
        begun, shown = 0.0, frames[0][1][y]
        blank: Frame = (total, [()] * ROWS)
        for now, rows in [*frames[1:], blank]:
            if rows[y] != shown:
                end = None if now == total else now
                spans.setdefault((begun, end), []).extend(texts_of(y, shown))
                begun, shown = now, rows[y]
    styles, groups = [], []
    for number, ((begun, end), texts) in enumerate(sorted(spans.items(), key=str)):
        if texts:
            states = [(0.0, "hidden"), (begun, "visible"), (end, "hidden")]
            steps = "".join(
                f"{100 * at / total:.2f}%{{visibility:{state}}}"
                for at, state in states
                if at is not None
            )
            look = f"animation:k{number} {total:.1f}s step-end infinite"
            look += "" if end is None else ";visibility:hidden"
            styles.append(f"@keyframes k{number}{{{steps}}}.g{number}{{{look}}}")
            groups.append(f'<g class="g{number}">{"".join(texts)}</g>')
    width, height = 2 * MARGIN + round(COLUMNS * CELL), 2 * MARGIN + ROWS * LINE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" font-family="monospace" font-size="14">',
        "<title>pip install, mie pull and mie run in a terminal</title>",
        f"<style>{''.join(styles)}",
        "text{white-space:pre}@media (prefers-reduced-motion){g{animation:none!important}}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        *groups,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def texts_of(y: int, runs: tuple[Run, ...]) -> Iterator[str]:
    """Yield the runs of a row as elements, each on the grid of the terminal."""
    for x, text, color, is_bold in runs:
        start = len(text) - len(text.lstrip())
        text = text.lstrip()
        place = f'x="{MARGIN + (x + start) * CELL:.1f}" y="{MARGIN + y * LINE + 14}"'
        look = f'fill="{color}"' + (' font-weight="bold"' if is_bold else "")
        length = f'textLength="{len(text) * CELL:.1f}" lengthAdjust="spacingAndGlyphs"'
        yield f"<text {place} {look} {length}>{escape(text)}</text>"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        data = convert(BUNDLED_DIRECTORY, folder / "tiny.gguf", "Q8_0", "gpt-2").read_bytes()
        with HubServer({NAME: {"tiny-Q8_0.gguf": data}}) as hub:
            environment = {
                **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                "PATH": f"{folder / 'venv/bin'}:{os.environ['PATH']}",
                "PS1": "$ ",
                "TERM": "xterm-256color",
                "PIP_QUIET": "2",
                "HF_HOME": str(folder / "hub"),
                "HF_ENDPOINT": hub.address,
                "XDG_CACHE_HOME": str(folder / "cache"),
            }
            PICTURE.write_text(draw(record(environment, ROOT)), encoding="utf-8")


if __name__ == "__main__":
    main()
