"""Write the timeline of a run as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from mie.events import Record, Segment, Seq, Summary
from mie.events.replay import State, walk
from mie.events.replay.slots import SlotState
from mie.lab.trace_blocks import title, title_of

Event = dict[str, Any]

ENGINE, REQUESTS, SLOTS = 1, 2, 3
"""The processes of the trace.

They are for steps and counters, for a track per sequence, and for a track per slot of states.
"""

STEPS = 1
"""The track of the steps."""


def write_timeline(segments: Iterable[Segment], file: TextIO) -> int:
    """Write the timeline of a log, and return the number of events.

    Raises:
        TraceError: the log contradicts itself.
    """
    num_events = 0
    file.write('{"displayTimeUnit":"ms","traceEvents":[')
    for event in _Timeline().events(segments):
        file.write(",\n" if num_events else "\n")
        file.write(json.dumps(event, separators=(",", ":")))
        num_events += 1
    file.write("\n]}\n")
    return num_events


def _new_sequences(record: Record, state: State) -> Iterator[tuple[Seq, str, int]]:
    """Yield (sequence, request id, n) of the sequences that a record names first."""
    match record:
        case ("add", request_id, number, _, _, n, _):
            yield (number, 0), request_id, n
        case ("fork" | "wait", seq, parent, *_):
            values = state.sequences[parent]
            yield seq, values.request_id, values.n
        case ("rebuild", snapshot):
            for seq, facts in snapshot["sequences"].items():
                yield seq, facts["request_id"], facts["n"]


@dataclass(kw_only=True)
class _Span:
    """An activity of a sequence that has not ended."""

    name: str
    start: int
    args: Event = field(default_factory=dict)
    end: int | None = None
    """For decodes, the end of the last step. None means that it lasts until the next event."""
    step: int = 0
    """For decodes, the last step."""


class _Timeline:
    """Turns records into events, with times in nanoseconds.

    A sequence that computes in a step does so from its start to its end.
    """

    def __init__(self) -> None:
        self._spans: dict[Seq, _Span] = {}
        self._tracks: dict[Seq, int] = {}
        self._slots: dict[int, _Span] = {}
        self._named_slots: set[int] = set()
        self._summary: Summary | None = None
        self._step = 0  # Abandoned steps leave no gap.
        self._start = self._end = 0  # the times of the current step
        self._has_run = False  # whether the current records are from after its computation

    def events(self, segments: Iterable[Segment]) -> Iterator[Event]:
        """Yield all events. They are not sorted by time."""
        yield _meta("process_name", ENGINE, name="engine")
        yield _meta("process_name", REQUESTS, name="requests")
        yield _meta("thread_name", ENGINE, STEPS, name="steps")
        for summary, record, state in walk(segments):
            if summary is not self._summary:
                self._begin_step(summary)
            if not self._tracks:
                yield from self._meet(state)
            for seq, request_id, n in _new_sequences(record, state):
                yield from self._new_track(seq, request_id, n)
            yield from self._of(record, state)
            if state.slots is not None:
                yield from self._of_slots(record, state, state.slots)
        for seq in list(self._spans):
            yield from self._end_span(seq, self._end)
        for slot in list(self._slots):
            yield from self._end_slot(slot, self._end)

    def _begin_step(self, summary: Summary | None) -> None:
        self._summary, self._has_run = summary, False
        self._step += 1
        if summary is None:
            self._start = self._end
        else:
            self._start = _nanoseconds(summary["start"])
            self._end = _nanoseconds(summary["start"] + summary["seconds"])

    def _meet(self, state: State) -> Iterator[Event]:
        """Yield events for sequences that exist at the start of the log."""
        for seq, values in state.sequences.items():
            yield from self._new_track(seq, values.request_id, values.n)
            if values.row is None:
                self._spans[seq] = _Span(name="waiting", start=self._start)
        for slot, owner in state.slots.owners().items() if state.slots else ():
            yield from self._begin_slot(slot, owner, state)

    def _of_slots(self, record: Record, state: State, slots: SlotState) -> Iterator[Event]:
        """Yield events for slots of states, given the state before the record."""
        match record:
            case ("state", owner, slot) | ("save", owner, slot):
                yield from self._begin_slot(slot, owner, state)
            case ("close", seq) if seq in slots.running:
                yield from self._end_slot(slots.running[seq], self._now)
            case ("forget", block) if block in slots.saved:
                yield from self._end_slot(slots.saved[block], self._now)
            case ("rebuild", _):
                for slot in list(self._slots):
                    yield from self._end_slot(slot, self._start)

    def _begin_slot(self, slot: int, owner: Seq | int, state: State) -> Iterator[Event]:
        if slot not in self._named_slots:
            if not self._named_slots:
                yield _meta("process_name", SLOTS, name="slots of states")
            self._named_slots.add(slot)
            yield _meta("thread_name", SLOTS, slot + 1, name=f"slot {slot}")
        if isinstance(owner, int):
            num_tokens = state.blocks.num_tokens(owner)
            span = _Span(name=f"snapshot, {num_tokens} tokens", start=self._now)
            span.args = {"block": owner, "tokens": num_tokens}
        else:
            span = _Span(name=title_of(owner, state), start=self._now)
        self._slots[slot] = span

    def _end_slot(self, slot: int, now: int) -> Iterator[Event]:
        span = self._slots.pop(slot, None)
        if span is not None and now > span.start:
            yield _slice(span.name, span.start, now, SLOTS, slot + 1, span.args)

    def _of(self, record: Record, state: State) -> Iterator[Event]:
        match record:
            case ("add", _, number, _, num_prompt, _, _):
                args = {"prompt tokens": num_prompt}
                self._spans[number, 0] = _Span(name="waiting", start=self._start, args=args)
            case ("admit" | "resume", seq, *_):
                yield from self._end_span(seq, self._start)
            case ("hit", seq, num_queried, num_full, num_partial, _):
                args = {"queried": num_queried, "in full blocks": num_full, "copied": num_partial}
                yield self._instant(seq, "prefix hit", args)
            case ("depart", seq, position, reason, *_):
                args = {"token": position, "reason": reason}
                yield self._instant(seq, "departs from the cache", args)
            case ("read", seq, host, num_tokens):
                args = {"tokens": num_tokens, "blocks": len(host)}
                yield self._instant(seq, "read from a disk", args)
            case ("prefill", seq, first, count, choices):
                self._has_run = True
                yield from self._end_span(seq, self._start)
                args = {"from position": first, "tokens": count, "sampled": len(choices)}
                yield _slice(
                    f"prefill {count}", self._start, self._end, REQUESTS, self._tracks[seq], args
                )
            case ("decode", rows):
                self._has_run = True
                for row in rows:
                    yield from self._decode(state.rows[row])
            case ("verify", seq, _, count, num_accepted):
                self._has_run = True
                yield from self._decode(seq, 1 + num_accepted)
                args = {"drafts": count, "kept": num_accepted}
                yield self._instant(seq, f"{num_accepted} of {count} drafts kept", args)
            case ("force", seq, count):
                yield self._instant(seq, "forced", {"tokens": count})
            case ("fork", seq, _, _):
                yield from self._end_span(seq, self._start)
                yield self._instant(seq, "forked", {})
            case ("wait", seq, _):
                self._spans[seq] = _Span(name="waiting", start=self._now)
            case ("rebuild", snapshot):
                # All sequences wait again, and those that are gone end.
                for seq in list(self._spans):
                    yield from self._end_span(seq, self._start)
                for seq in snapshot["sequences"]:
                    yield self._instant(seq, "rebuilt", {})
                    self._spans[seq] = _Span(name="waiting", start=self._start)
            case ("preempt", seq, by, mode, rule, num_lost):
                yield from self._end_span(seq, self._start)
                name = None if by is None else title_of(by, state)
                args = {"for": name, "rule": rule, "mode": mode, "lost": num_lost}
                yield self._instant(seq, "preempted", args)
                name = "swapped out" if mode == "swap" else "preempted"
                self._spans[seq] = _Span(name=name, start=self._start, args=args)
            case ("finish", seq, reason) if seq in self._tracks:
                yield from self._end_span(seq, self._now)
                yield self._instant(seq, f"finished: {reason}", {})
            case ("step", summary):
                yield from self._step_slices(summary)
                yield from self._counters(summary, state)

    @property
    def _now(self) -> int:
        return self._end if self._has_run else self._start

    def _decode(self, seq: Seq, num_tokens: int = 1) -> Iterator[Event]:
        """Count the tokens of a decode. Decodes in consecutive steps form one slice."""
        span = self._spans.get(seq)
        if span is None or span.step != self._step - 1:
            yield from self._end_span(seq, self._start)
            span = self._spans[seq] = _Span(name="decode", start=self._start, args={"tokens": 0})
        span.end, span.step = self._end, self._step
        span.args["tokens"] += num_tokens

    def _end_span(self, seq: Seq, now: int) -> Iterator[Event]:
        span = self._spans.pop(seq, None)
        if span is not None:
            end = now if span.end is None else span.end
            if end > span.start:
                track = self._tracks[seq]
                yield _slice(span.name, span.start, end, REQUESTS, track, span.args)

    def _new_track(self, seq: Seq, request_id: str, n: int) -> Iterator[Event]:
        if seq in self._tracks:  # a rebuild names it again
            return
        self._tracks[seq] = track = len(self._tracks) + 1
        yield _meta("thread_name", REQUESTS, track, name=title(request_id, seq[1], n))
        # Tracks are ordered by request, then by choice.
        yield _meta("thread_sort_index", REQUESTS, track, sort_index=seq[0] * 1000 + seq[1])

    def _instant(self, seq: Seq, name: str, args: Event) -> Event:
        return {
            "ph": "i",
            "s": "t",
            "name": name,
            "ts": self._now / 1000,
            "pid": REQUESTS,
            "tid": self._tracks[seq],
            "args": args,
        }

    def _step_slices(self, summary: Summary) -> Iterator[Event]:
        numbers = {name: value for name, value in summary.items() if name.startswith("num_")}
        yield _slice(f"step {summary['step']}", self._start, self._end, ENGINE, STEPS, numbers)
        start, seconds = self._start, summary["start"]
        for name in ("schedule", "run", "update"):
            seconds += summary[f"{name}_seconds"]
            end = min(_nanoseconds(seconds), self._end)
            yield _slice(name, start, end, ENGINE, STEPS, {})
            start = end

    def _counters(self, summary: Summary, state: State) -> Iterator[Event]:
        used, cached = summary["num_blocks_used"], summary["num_blocks_cached"]
        num_slots = used * state.blocks.block_size
        waste = 100 * summary["num_slots_empty"] / num_slots if num_slots else 0
        slots = state.slots
        num_states = {}
        if slots is not None:
            num_states["states"] = {"running": len(slots.running), "snapshots": len(slots.saved)}
        for name, values in (
            *num_states.items(),
            ("KV blocks", {"used": used, "cached": cached}),
            ("running", {"sequences": summary["num_running"]}),
            ("waiting", {"sequences": summary["num_waiting"]}),
            ("waste %", {"of used slots": round(waste, 2)}),
        ):
            yield {"ph": "C", "name": name, "ts": self._end / 1000, "pid": ENGINE, "args": values}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _slice(name: str, start: int, end: int, process: int, track: int, args: Event) -> Event:
    return {
        "ph": "X",
        "name": name,
        "ts": start / 1000,  # the format counts microseconds
        "dur": (end - start) / 1000,
        "pid": process,
        "tid": track,
        "args": args,
    }


def _meta(what: str, process: int, track: int = 0, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": args}
