"""Show the life of one request, with a line for each event."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mie.base.reprs import clipped, count
from mie.cli.trace_blocks import new_sequences, title, title_of
from mie.errors import TraceError
from mie.events import FIELDS, Record, Segment, Seq, Snapshot
from mie.events.replay import State, walk

MAX_NAMED = 8
"""Maximum number of other requests in an error message."""


def request_lines(segments: Iterable[Segment], request_id: str) -> Iterator[str]:
    """Yield a line for each event of the request's choices, in order.

    Raises:
        TraceError: the log has no such request, or contradicts itself.
    """
    life = _Life(request_id)
    for summary, record, state in walk(segments):
        life.meet(record, state)
        yield from life.lines(state.step + 1 if summary is None else summary["step"], record, state)
    yield from life.last_lines()
    if not life.is_known:
        raise TraceError(f"the log has no request {request_id!r}; it has {life.others()}")


@dataclass(kw_only=True)
class _Decodes:
    """Consecutive decodes of one choice."""

    first: int
    last: int
    num_tokens: int


class _Life:
    """Selects the events of a request, and groups its decodes."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._ids: dict[str, None] = {}  # ids of all requests, in order
        self._names: dict[Seq, str] = {}  # of the request's sequences
        self._decodes: dict[Seq, _Decodes] = {}

    @property
    def is_known(self) -> bool:
        return self._request_id in self._ids

    def others(self) -> str:
        """Return the first few request ids of the log for an error message."""
        ids = [clipped(title(request_id, 0, 1), 40) for request_id in self._ids]
        return ", ".join(ids[:MAX_NAMED] + ["…"] * (len(ids) > MAX_NAMED)) or "none"

    def meet(self, record: Record, state: State) -> None:
        """Note new sequences."""
        if not self._ids:
            for seq, values in state.sequences.items():
                self._name(seq, values.request_id, values.n)
        for seq, request_id, n in new_sequences(record, state):
            self._name(seq, request_id, n)

    def _name(self, seq: Seq, request_id: str, n: int) -> None:
        self._ids[request_id] = None
        if request_id == self._request_id:
            self._names[seq] = title("", seq[1], n).strip()

    def lines(self, step: int, record: Record, state: State) -> Iterator[str]:
        """Yield the lines for a record. ``state`` is the state before it."""
        if record[0] == "decode":
            self._gather(step, record, state)
            return
        if record[0] == "rebuild":
            yield from self._rebuild_lines(step, record[1], state)
            return
        seq, sentence = _seq_of(record), _sentence(record, state)
        if seq in self._names and sentence is not None:
            yield from self._decode_lines(seq)
            yield _line(f"step {step}", self._names[seq], sentence)

    def last_lines(self) -> Iterator[str]:
        """Yield the remaining lines at the end of the log."""
        for seq in list(self._decodes):
            yield from self._decode_lines(seq)

    def _rebuild_lines(self, step: int, snapshot: Snapshot, state: State) -> Iterator[str]:
        left = snapshot["sequences"]
        for seq in self._names:
            if seq in left or seq in state.sequences:
                yield from self._decode_lines(seq)
                what = "waits again" if seq in left else "has ended"
                yield _line(f"step {step}", self._names[seq], f"{what}: the state was rebuilt")

    def _gather(self, step: int, record: Record, state: State) -> None:
        for seq in map(state.rows.__getitem__, record[1]):
            if seq in self._names:
                run = self._decodes.setdefault(seq, _Decodes(first=step, last=step, num_tokens=0))
                run.last = step
                run.num_tokens += 1

    def _decode_lines(self, seq: Seq) -> Iterator[str]:
        run = self._decodes.pop(seq, None)
        if run is not None:
            is_one = run.first == run.last
            when = f"step {run.first}" if is_one else f"steps {run.first}–{run.last}"
            yield _line(when, self._names[seq], f"decoded {count(run.num_tokens, 'token')}")


def _line(when: str, name: str, sentence: str) -> str:
    return f"{when:>15}  {name}{' ' if name else ''}{sentence}"


def _seq_of(record: Record) -> Seq | None:
    """Return the sequence of a record, or None."""
    kind, *values = record
    if kind == "add":
        return (values[1], 0)
    return values[0] if FIELDS[kind][0] == "seq" else None


def _sentence(record: Record, state: State) -> str | None:
    """Describe a record as an event of a request, or return None if it does not affect it."""
    match record:
        case ("add", _, _, _, num_prompt, n, max_tokens):
            limit = "" if max_tokens is None else f", at most {count(max_tokens, 'new token')}"
            choices = f", {n} choices" if n > 1 else ""
            return f"added: {count(num_prompt, 'prompt token')}{limit}{choices}"
        case ("admit", _, row, num_tokens, num_computed):
            return f"admitted to row {row}: {_left(num_tokens, num_computed)}"
        case ("resume", _, row, num_tokens, num_computed, mode):
            how = "swapped in" if mode == "swap" else "resumed"
            return f"{how} to row {row}: {_left(num_tokens, num_computed)}"
        case ("hit", _, num_queried, num_full, num_partial, source):
            part = "" if source is None else f", {num_partial} by a copy from block {source}"
            return f"prefix hit: of {num_queried} tokens {num_full} in full blocks{part}"
        case ("prefill", _, start, num_tokens, choices):
            got = f", and sampled {count(len(choices), 'token')}" if choices else ""
            return f"computed {count(num_tokens, 'token')} from position {start}{got}"
        case ("force", _, num_tokens):
            return f"got {count(num_tokens, 'token')} more: nothing else could follow"
        case ("fork", _, _, row):
            return f"forked to row {row}"
        case ("branch", _, parent, row):
            return f"forked to row {row}, from {state.sequences[parent].request_id}"
        case ("keep", _):
            return "ended, keeps its blocks"
        case ("wait", *_):
            return "waits for its own row"
        case ("preempt", _, by, mode, rule, num_lost):
            return f"preempted: {mode}, {num_lost} computed tokens lost ({_cause(by, rule, state)})"
        case ("finish", _, reason):
            return f"finished: {reason}"
    return None


def _left(num_tokens: int, num_computed: int) -> str:
    return f"{num_tokens - num_computed} of {count(num_tokens, 'token')} to compute"


def _cause(by: Seq | None, rule: str, state: State) -> str:
    if by is None:
        return "a step was abandoned"
    return f"{title_of(by, state)} needed room; victim: {rule}"
