"""Apply page records as the page does: each one only assigns cells."""

from collections.abc import Iterable, Iterator
from typing import Any

from mie.events.replay import State
from mie.page.cells import NodeText, all_cells


class Page:
    """The cells of a page by their names."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._empty()

    def _empty(self) -> None:
        self.blocks: dict[int, tuple[int, int, int]] = {}
        self.seqs: dict[str, dict[str, Any]] = {}
        self.tables: dict[str, list[int]] = {}
        self.host: dict[str, list[int]] = {}
        self.tree: dict[str, dict[str, Any]] = {}
        self.heat: dict[str, list[int | None]] = {}
        self.slots: dict[str, str | int | None] = {}

    def take(self, record: dict[str, Any]) -> None:
        """Assign the cells of a record."""
        if record["record"] == "key":
            self._empty()
            self._assign(record)
            self.step = record["step"]
        elif record["record"] in ("steps", "now"):
            self._assign(record["set"])
            if record["record"] == "steps":
                self.step = record["steps"][-1]["row"][0]

    def _assign(self, cells: dict[str, Any]) -> None:
        for seq in cells.get("gone", ()):
            for table in (self.seqs, self.tables, self.host):
                table.pop(seq, None)
        for block in cells.get("cut", ()):
            self.tree.pop(str(block), None)
            self.heat.pop(str(block), None)
        for block, *cell in cells.get("blocks", ()):
            self.blocks[block] = tuple(cell)
        for seq, fields in cells.get("seqs", {}).items():
            self.seqs.setdefault(seq, {}).update(fields)
        for seq, (start, blocks) in cells.get("tables", {}).items():
            self.tables[seq] = self.tables.get(seq, [])[:start] + blocks
        self.host.update(cells.get("host", {}))
        self.tree.update(cells.get("tree", {}))
        self.heat.update(cells.get("heat", {}))
        self.slots.update(cells.get("slots", {}))

    def cells(self) -> dict[str, Any]:
        """Return the state as `all_cells` does, but as a page finds it: without empty cells."""
        return {
            "blocks": {block: cell for block, cell in self.blocks.items() if any(cell)},
            "seqs": self.seqs,
            "tables": {seq: blocks for seq, blocks in self.tables.items() if blocks},
            "host": {seq: blocks for seq, blocks in self.host.items() if blocks},
            "tree": self.tree,
            "slots": {slot: owner for slot, owner in self.slots.items() if owner is not None},
        }


def cells_of(state: State, text: NodeText) -> dict[str, Any]:
    """Return all cells of a state in the shape of `Page.cells`."""
    cells = all_cells(state, text)
    cells["blocks"] = {block: tuple(cell) for block, *cell in cells["blocks"]}
    cells["tables"] = {seq: blocks for seq, (_, blocks) in cells["tables"].items()}
    return cells


def states(records: Iterable[dict[str, Any]]) -> Iterator[Page]:
    """Yield one page after each record. It changes while one iterates."""
    page = Page()
    for record in records:
        page.take(record)
        yield page
