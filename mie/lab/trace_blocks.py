"""Draw the block map after a step in 80 columns, and name sequences for all views of a log."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from string import ascii_lowercase, ascii_uppercase

from mie.base.reprs import clipped, count
from mie.events import Seq
from mie.events.replay import State
from mie.events.replay.slots import SlotState

WIDTH = 80
"""Maximum width of a view in columns."""


def title(request_id: str, index: int, n: int) -> str:
    """Return a sequence's name: its request id, and its index if there are several choices."""
    name = "".join(char if char.isprintable() else "?" for char in request_id)
    return f"{name} [{index}]" if n > 1 else name


def title_of(seq: Seq, state: State) -> str:
    """Return the name of a sequence that the state has."""
    values = state.sequences[seq]
    return title(values.request_id, seq[1], values.n)


def percent(part: int, whole: int) -> str:
    """Return a percentage such as ``"12 %"``, or a dash if ``whole`` is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "–"


FREE, CACHED, PINNED = "·", "▒", "?"
LETTERS = ascii_uppercase + ascii_lowercase
MAX_WAITING = 20
"""Maximum number of lines for the waiting queue."""

_LEGEND = (
    "A letter is a sequence whose table has the block; AB, A+: several share it. Then",
    "how many slots hold a token, and × references (of tables and the prefix cache).",
    f"{CACHED} in the prefix cache only   {FREE} free",
)


def render_blocks(state: State) -> str:
    """Return the block map, the queues and the numbers as text."""
    labels = dict(zip(state.running, _labels(), strict=False))
    size, blocks = state.blocks.block_size, state.blocks.num_blocks
    lines = [f"After step {state.step}: {count(blocks, 'block')} of {count(size, 'slot')}", ""]
    lines += _grid(*_cells(state, labels), blocks)
    lines += ["", *_LEGEND, "", *_queues(state, labels), "", *_numbers(state)]
    if state.slots is not None:
        lines += ["", *_states(state, state.slots, labels)]
    return "\n".join(line.rstrip() for line in lines)


def _labels() -> Iterator[str]:
    """Yield the labels A … Z, a … z, AA … zz, and so on."""
    prefixes = [""]
    while True:
        prefixes = [prefix + letter for prefix in prefixes for letter in LETTERS]
        yield from prefixes


def _cells(state: State, labels: dict[Seq, str]) -> tuple[dict[int, str], str]:
    """Return the cell of each held block, and the cell of a free block, with equal widths."""
    owners, fills = _owners(state, labels), state.fills()
    parts = {-1: (FREE, "", "")}
    for block, refs in sorted(state.blocks.refs.items()):
        mark = CACHED if block in state.blocks.tree else PINNED
        parts[block] = (owners.get(block, mark), str(fills.get(block, "")), f"×{refs}")
    widths = [max(map(len, column)) for column in zip(*parts.values(), strict=True)]
    cells = {
        block: f"{owner:<{widths[0]}} {fill:>{widths[1]}}{refs:<{widths[2]}}"
        for block, (owner, fill, refs) in parts.items()
    }
    return cells, cells.pop(-1)


def _owners(state: State, labels: dict[Seq, str]) -> dict[int, str]:
    """Return the letters of each block's owners. If there are many, it is the first and a plus."""
    owners: dict[int, list[str]] = {}
    for seq, label in labels.items():
        for block in state.sequences[seq].blocks:
            owners.setdefault(block, []).append(label)
    # If labels have two letters, "AB" is one label and cannot mean A and B.
    most = 3 if len(labels) <= len(LETTERS) else 1
    return {
        block: "".join(names) if len(names) <= most else f"{names[0]}+"
        for block, names in owners.items()
    }


def _grid(held: dict[int, str], free: str, num_blocks: int, noun: str = "block") -> Iterator[str]:
    """Yield rows of cells, each after the number of its first block. Equal rows are merged."""
    margin = len(str(num_blocks)) + 2
    num_fitting = (WIDTH + 1 - margin) // (len(free) + 1)
    per_row = max(n for n in (1, 2, 4, 8, 16) if n == 1 or n <= num_fitting)
    rows = _rows(held, free, num_blocks, per_row)
    for _, group in groupby(rows, _likeness):
        like = list(group)
        start, cells, _ = like[0]
        yield f"{start:>{margin - 2}}  {' '.join(cells)}"
        num_more = sum(number for _, _, number in like) - len(cells)
        if num_more:
            yield f"{'':>{margin}}… and {count(num_more, noun)} like these"


Row = tuple[int, list[str], int]
"""The first block of a row, its cells, and the blocks that it represents."""


def _rows(held: dict[int, str], free: str, num_blocks: int, per_row: int) -> Iterator[Row]:
    """Yield the rows in order, with adjacent rows of free blocks merged: a pool may be huge."""
    start = 0
    for row in sorted({block // per_row for block in held} | {num_blocks // per_row}):
        first, end = row * per_row, min((row + 1) * per_row, num_blocks)
        if start < first:
            yield start, [free] * per_row, first - start
        if first < end:
            yield first, [held.get(block, free) for block in range(first, end)], end - first
        start = end


def _likeness(row: Row) -> object:
    """Return a key that is equal for rows that may be merged.

    These are rows of only free blocks, and rows of only cached blocks.
    """
    start, cells, _ = row
    return cells if len({*cells}) == 1 and cells[0][0] in (FREE, CACHED) else start


def _queues(state: State, labels: dict[Seq, str]) -> Iterator[str]:
    """Yield a line for each sequence, in the order of the queues."""
    width = max([len(title_of(seq, state)) for seq in state.sequences] or [0])
    width = min(max(width, len("running")), 20)
    yield f"{'':4}{'running':<{width}}   row  tokens  computed  blocks"
    for seq, label in labels.items():
        values = state.sequences[seq]
        numbers = f"{values.row:>6}  {values.num_tokens:>6}  {values.num_computed:>8}"
        line = f"{label:<4}{clipped(title_of(seq, state), width):<{width}}{numbers}  "
        yield line + _in_width(values.blocks, WIDTH - len(line))
    waiting = state.waiting
    if waiting:
        yield f"{'':4}waiting"
    for seq in waiting[:MAX_WAITING]:
        values = state.sequences[seq]
        line = f"{'':4}{clipped(title_of(seq, state), width):<{width}}{values.num_tokens:>14}"
        yield line + ("" if values.host is None else f"  {count(len(values.host), 'host block')}")
    if waiting[MAX_WAITING:]:
        yield f"{'':4}… and {len(waiting) - MAX_WAITING:,} more"


def _in_width(numbers: Sequence[int], width: int) -> str:
    """Return the numbers as text, cut after ``width`` columns."""
    text = " ".join(map(str, numbers))
    return text if len(text) <= width else text[: width - 2].rpartition(" ")[0] + " …"


def _numbers(state: State) -> Iterator[str]:
    blocks, fills = state.blocks, state.fills()
    num_slots = blocks.num_used * blocks.block_size
    num_empty = num_slots - sum(fills[block] for block in blocks.in_tables)
    yield (
        f"{blocks.num_used} of {count(blocks.num_blocks, 'block')} used"
        f" ({percent(blocks.num_used, blocks.num_blocks)}) · {blocks.num_cached:,} cached"
        f" · {blocks.num_blocks - len(blocks.refs):,} free · sharing saves {blocks.num_saved:,}"
    )
    waste = percent(num_empty, num_slots)
    yield f"{num_empty:,} of {count(num_slots, 'slot')} in used blocks empty ({waste})"


def _states(state: State, slots: SlotState, labels: dict[Seq, str]) -> Iterator[str]:
    """Yield the map of the slots of states, and their numbers."""
    parts = {
        slot: (f"{CACHED}{owner}", state.blocks.num_tokens(owner))
        if isinstance(owner, int)
        else (labels[owner], state.sequences[owner].num_computed)
        for slot, owner in sorted(slots.owners().items())
    }
    width = max([len(owner) for owner, _ in parts.values()] or [1])
    digits = max([len(f"{num_tokens}") for _, num_tokens in parts.values()] or [1])
    cells = {
        slot: f"{owner:<{width}} {num_tokens:>{digits}}"
        for slot, (owner, num_tokens) in parts.items()
    }
    yield from _grid(cells, FREE.ljust(width + 1 + digits), slots.num_slots, "slot")
    num_running, num_saved = len(slots.running), len(slots.saved)
    yield ""
    yield (
        f"{count(slots.num_slots, 'slot')} of states: {num_running:,} running,"
        f" {count(num_saved, 'snapshot')}, {slots.num_slots - len(parts):,} free"
    )
    yield f"A: a sequence's state; {CACHED}5: the snapshot at block 5; then, the tokens in it"
