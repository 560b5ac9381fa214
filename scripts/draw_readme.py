"""Draw the README's picture: the KV blocks of four requests that share prefixes.

    python scripts/draw_readme.py

The script runs four requests on the bundled model, replays the event log to one step, and writes
docs/pictures/blocks.svg. Everything in the picture comes from the log. The run computes in
float64, so that it chooses the same tokens on every machine.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from mie import LLM, SamplingParams
from mie.events import EventLog, Segment
from mie.events.replay import State, at, walk

PICTURE = Path(__file__).resolve().parents[1] / "docs/pictures/blocks.svg"
STEP = 5
PROMPTS = (
    "Once there was a little fox named Mia who lived by the lake",
    "Once there was a little fox named Mia who lived by the mill",
    "Once there was a little fox named Hugo",
    "Once there was a little owl named Nora",
)
NAMES = "ABCD"

GRAY, INK = "#7a7a7a", "#1b2430"
"""Text on the page, readable on white and on black, and text in a box."""
FILLS = {1: "#ffdf9e", 2: "#cbe3ff", 3: "#a9cffb", 4: "#83b8f5"}
"""The color of a block, by the number of tables that contain it."""

LEFT, TOP, WIDTH, HEIGHT, CELL, GAP = 30, 30, 163, 42, 51, 4
"""Pixels: margins, an entry of a table, a block of the pool, and the gap between boxes."""


def record_run() -> tuple[list[Segment], Callable[[int], str]]:
    """Run the requests. Return the event log, and a function that spells a token."""
    llm = LLM("bundled", dtype="float64", block_size=4, num_blocks=16, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    llm.generate(list(PROMPTS), params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    log = llm.engine.log
    assert isinstance(log, EventLog)
    return log.segments(), lambda token: tokenizer.decode([token]).strip()


def stored_tokens(segments: Sequence[Segment], state: State) -> dict[int, list[int]]:
    """Return the tokens in each used block.

    The log names the tokens of a block when the block is full, perhaps after this step.
    """
    tokens = {block: list(node.tokens) for block, node in state.blocks.tree.items()}
    for summary, (kind, *values), _ in walk(segments):
        if kind == "seal" and summary is not None and summary["step"] > state.step:
            tokens.setdefault(values[0], list(values[3]))
    fills = state.fills()
    return {block: tokens[block][: fills[block]] for block in state.blocks.in_tables}


def draw(segments: Sequence[Segment], decode: Callable[[int], str]) -> str:
    """Return the tables and the pool after step `STEP` as SVG."""
    state = at(segments, STEP)
    tables = [state.sequences[seq].blocks for seq in state.running]
    stored = stored_tokens(segments, state)
    words = {block: " ".join(map(decode, tokens)) for block, tokens in stored.items()}
    pool_top = TOP + len(tables) * HEIGHT + 36
    right, bottom = LEFT + state.blocks.num_blocks * CELL, pool_top + CELL
    sizes = f'viewBox="0 0 {right} {bottom}" width="{right}" height="{bottom}"'
    num_entries = sum(map(len, tables))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {sizes} font-family="sans-serif">',
        f"<title>{num_entries} entries in block tables, {len(words)} blocks</title>",
        text(LEFT, 18, f"Block tables of four requests, after step {STEP} of a real run", GRAY),
        *draw_tables(tables, words, state),
        text(
            LEFT, pool_top - 12, f"The pool: {num_entries} table entries, {len(words)} blocks", GRAY
        ),
        *draw_pool(tables, state.blocks.num_blocks, pool_top),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def draw_tables(
    tables: Sequence[Sequence[int]], words: dict[int, str], state: State
) -> Iterator[str]:
    """Yield a row for each table. A block of several tables is one box over their rows."""
    for row, table in enumerate(tables):
        y = TOP + row * HEIGHT
        yield text(10, y + 24, NAMES[row], GRAY)
        for column, block in enumerate(table):
            count = len(holders(tables, block))
            if row and block in tables[row - 1]:
                continue  # the box began above
            x, height = LEFT + column * WIDTH, count * HEIGHT - GAP
            middle = y + height // 2
            free = state.blocks.block_size - state.fills()[block]
            yield box(x, y, WIDTH - GAP, height, FILLS[count])
            yield text(x + 8, middle - 2, words[block], INK, size=12)
            note = f"block {block}" + (f", room for {free}" if free else "")
            yield text(x + 8, middle + 13, note, INK, size=11)


def draw_pool(tables: Sequence[Sequence[int]], num_blocks: int, top: int) -> Iterator[str]:
    """Yield all blocks with the names of the tables that contain them."""
    for block in range(num_blocks):
        x, names = LEFT + block * CELL, holders(tables, block)
        yield box(x, top, CELL - GAP, CELL - GAP, FILLS.get(len(names)))
        yield text(x + 6, top + 18, str(block), INK if names else GRAY)
        yield text(x + 6, top + 36, names or "free", INK if names else GRAY, size=11)


def holders(tables: Sequence[Sequence[int]], block: int) -> str:
    """Return the names of the tables that contain a block."""
    return "".join(name for name, table in zip(NAMES, tables, strict=True) if block in table)


def box(x: int, y: int, width: int, height: int, fill: str | None) -> str:
    """Return a rectangle, or an outline if there is no fill."""
    paint = f'fill="{fill}"' if fill else f'fill="none" stroke="{GRAY}" stroke-dasharray="3 3"'
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" {paint}/>'


def text(x: int, y: int, content: str, fill: str, *, size: int = 13) -> str:
    """Return a line of text that begins at (x, y)."""
    return f'<text x="{x}" y="{y}" fill="{fill}" font-size="{size}">{escape(content)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(*record_run()), encoding="utf-8")
