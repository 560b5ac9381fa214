"""Write and read the event log as a file of JSON lines that grep and jq can search.

Every line has a ``step`` and an ``event``. The event is a kind of record with its fields by name,
``step`` with its summary, or ``snapshot``. A ``rebuild`` has the fields of a snapshot. The file
begins with a snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, BinaryIO

from mie.base.files import open_file, without_bom
from mie.errors import TraceError, shown
from mie.events.vocabulary import FIELDS, Record, Segment, Snapshot, Step, check_summary, checked

FORMAT_VERSION = 1
MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line. A snapshot names every cached token, and a million tokens take 7 MB."""

_STATES = {"running": "seq", "saved": "block", "hosts": "seq"}
"""The lists of slots in a snapshot, and the owners of their slots."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


# Writing.


def record_line(step: int, record: Record) -> str:
    """Return the line of a record."""
    kind, *values = record
    fields = dict(zip(FIELDS[kind], values, strict=True))
    if kind == "step":
        fields = fields["summary"]
    elif kind == "rebuild":
        fields = _with_lists_for_dicts(fields["snapshot"])
    return _encode({"step": step, "event": kind, **fields}) + "\n"


def snapshot_line(step: int, snapshot: Snapshot) -> str:
    """Return the line of a snapshot taken after ``step``."""
    head = {"step": step, "event": "snapshot", "version": FORMAT_VERSION}
    return _encode({**head, **_with_lists_for_dicts(snapshot)}) + "\n"


def _with_lists_for_dicts(snapshot: Snapshot) -> dict[str, Any]:
    """Return the snapshot with lists for dictionaries with keys that JSON would turn into text."""
    states = snapshot.get("states")
    return {
        **snapshot,
        **({} if states is None else {"states": _states_as_lists(states)}),
        "sequences": [{"seq": seq, **fields} for seq, fields in snapshot["sequences"].items()],
        "refs": list(snapshot["refs"].items()),
        "tree": [{"block": block, **fields} for block, fields in snapshot["tree"].items()],
    }


def _states_as_lists(states: Mapping[str, Any]) -> dict[str, Any]:
    lists = {
        name: [{owner: key, "slot": slot} for key, slot in states[name].items()]
        for name, owner in _STATES.items()
    }
    return {**states, **lists}


# Reading.


def read_log(path: str | PathLike[str]) -> Iterator[Segment]:
    """Yield the segments of the file at ``path`` one at a time, as they were written.

    A killed run can leave an incomplete last line. It is dropped, and `Segment.is_cut` is set.

    Raises:
        TraceError: the file cannot be read or is not an event log; the message names the line.
    """
    try:
        with open_file(path, allow_pipe=True) as file:
            yield from segments_of(str(path), file)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error


def segments_of(path: str, file: BinaryIO) -> Iterator[Segment]:
    """Yield the segments of an open file. Messages call it ``path``. See `read_log`."""
    draft: _Draft | None = None
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: it has more than {MAX_LINE_BYTES:,} bytes")
        if number == 1:
            line = without_bom(line)
        if draft and not line.endswith(b"\n"):
            yield draft.segment(is_cut=True)
            return
        try:
            fields = _parse(line)
            if fields["event"] == "snapshot":
                ended, draft = draft, _Draft(fields, draft)
                if ended:
                    yield ended.segment()
            elif draft:
                draft.add(fields)
            else:
                raise TraceError("a snapshot must come first")
        except TraceError as error:
            where = f"{path}, line {number}" if draft else f"{path} is not an event log: line 1"
            raise TraceError(f"{where}: {error}") from error
    if draft is None:
        raise TraceError(f"{path} is not an event log: it is empty")
    yield draft.segment()


class _Draft:
    """A segment that is being read."""

    def __init__(self, fields: dict[str, Any], before: _Draft | None) -> None:
        """Begin with a snapshot, at the end of the segment ``before``."""
        step, version = fields["step"], fields.get("version")
        if before and (before._rest or step != before._last):
            last = before._last
            raise TraceError(f"a snapshot after step {step} where step {last} has ended last")
        if version != FORMAT_VERSION:
            raise TraceError(f"format {shown(version)}; this mie reads format {FORMAT_VERSION}")
        self._after: int = step
        self._last: int = step
        self._snapshot = _read_snapshot(fields)
        self._steps: list[Step] = []
        self._rest: list[Record] = []

    def add(self, fields: dict[str, Any]) -> None:
        """Append the record of a line. It must belong to a step after the last ended step."""
        step, kind = fields["step"], fields.pop("event")
        if step <= self._last:
            raise TraceError(f"step {step} after the end of step {self._last}")
        self._rest.append(_read_record(kind, fields))
        if kind == "step":
            self._steps.append(tuple(self._rest))
            self._rest.clear()
            self._last = step

    def segment(self, *, is_cut: bool = False) -> Segment:
        """Return the segment that was read."""
        return Segment(
            after=self._after,
            snapshot=self._snapshot,
            steps=tuple(self._steps),
            rest=tuple(self._rest),
            is_cut=is_cut,
        )


def _parse(line: bytes) -> dict[str, Any]:
    """Parse a line into an object that has a step and an event."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError("not JSON") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("event"), str):
        raise TraceError("not an event")
    if type(fields.get("step")) is not int:
        raise TraceError("an event without a step")
    return fields


def _read_record(kind: str, fields: dict[str, Any]) -> Record:
    if kind == "step":
        check_summary(fields)
        return (kind, fields)
    if kind == "rebuild":
        return (kind, _read_snapshot(fields))
    if kind not in FIELDS:
        raise TraceError(f"unknown event {shown(kind)}")
    return (kind, *checked(fields, FIELDS[kind]).values())


_SIZES = ("block_size", "num_blocks", "num_host_blocks")
_OF_SEQUENCE = (
    *("seq", "request_id", "rank", "num_prompt", "max_tokens", "num_tokens", "num_computed"),
    *("row", "blocks", "host", "n"),
)
_OF_NODE = ("block", "parent", "salt", "tokens")
_OF_WINDOWS = ("entries", "num_passed", "entry")
"""The fields that only sequences and nodes with blocks of layers with a window have."""


def _read_snapshot(fields: Mapping[str, Any]) -> Snapshot:
    sizes = checked(fields, _SIZES)
    if sizes["num_blocks"] < 1 or sizes["num_host_blocks"] < 0:
        raise TraceError("num_blocks must be at least 1 and num_host_blocks at least 0")
    sequences = _objects(fields, "sequences", _OF_SEQUENCE)
    nodes = _objects(fields, "tree", _OF_NODE)
    states = fields.get("states")
    return {
        **({} if states is None else {"states": _read_states(states)}),
        **sizes,
        "waiting": _pairs(fields, "waiting"),
        "running": _pairs(fields, "running"),
        "sequences": {entry.pop("seq"): entry for entry in sequences},
        "refs": dict(_pairs(fields, "refs")),
        "tree": {entry.pop("block"): entry for entry in nodes},
    }


def _read_states(fields: Any) -> dict[str, Any]:
    sizes = checked(fields, ("num_slots", "num_host_slots"))
    slots = {
        name: [checked(entry, (owner, "slot")) for entry in _list(fields, name)]
        for name, owner in _STATES.items()
    }
    return sizes | {
        name: {entry[_STATES[name]]: entry["slot"] for entry in entries}
        for name, entries in slots.items()
    }


def _objects(fields: Mapping[str, Any], name: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the objects of a list, each with these fields and the fields of windows."""
    return [
        _with_lists(checked(each, names) | checked(each, [n for n in _OF_WINDOWS if n in each]))
        for each in _list(fields, name)
    ]


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise TraceError(f"{name} is not a list")
    return value


def _pairs(fields: Mapping[str, Any], name: str) -> list[tuple[int, int]]:
    return [checked({"seq": pair}, ("seq",))["seq"] for pair in _list(fields, name)]


def _with_lists(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the mappings of a snapshot to lists."""
    lists = {"blocks", "host", "tokens"}
    return {
        name: list(value) if name in lists and value is not None else value
        for name, value in fields.items()
    }
