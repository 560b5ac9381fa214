"""Write the story of one request, from an event log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from mie.base.reprs import count
from mie.errors import ConfigError, shown
from mie.events import Record, Segment, Seq
from mie.events.replay import State, walk
from mie.lab.trace_blocks import title_of

MAX_NAMED = 5
"""Requests that are named where one is not found."""

Decode = Callable[[Sequence[int]], str]


def story_of(
    segments: Iterable[Segment], request_id: str, decode: Decode | None = None
) -> Iterator[str]:
    """Yield the lines of a request's story. Tokens are ids without ``decode``.

    Raises:
        ConfigError: the log has no request of this id.
        TraceError: the log contradicts itself.
    """
    known: dict[str, None] = {}
    numbers: set[int] = set()
    decodes: dict[Seq, list[int | None]] = {}  # steps of decodes without another record between
    is_found = False
    for summary, record, state in walk(segments):
        step = None if summary is None else summary["step"]
        if not known:
            known = {values.request_id: None for values in state.sequences.values()}
            numbers = {seq[0] for seq, x in state.sequences.items() if x.request_id == request_id}
        if record[0] == "add":
            known[record[1]] = None
            if record[1] == request_id:
                numbers.add(record[2])
        is_found |= bool(numbers)
        if record[0] == "decode":
            for seq in (state.rows[row] for row in record[1]):
                if seq[0] in numbers:
                    decodes.setdefault(seq, []).append(step)
            continue
        for seq in _sequences(record, numbers, state):
            yield from _decoded(seq, decodes)
            yield _line(step, seq, _event(record, seq, state, decode))
    for seq in [*decodes]:
        yield from _decoded(seq, decodes)
    if not is_found:
        some = ", ".join(map(shown, islice(known, MAX_NAMED))) or "none"
        raise ConfigError(
            f"--request {shown(request_id)} is not in the log; its first requests are: {some}"
        )


def _sequences(record: Record, numbers: set[int], state: State) -> list[Seq]:
    """Return the sequences of the request with this record in its story."""
    kind, *values = record
    if kind == "add":
        return [(values[1], 0)] if values[1] in numbers else []
    if kind == "copy":
        seq = values[2]
    elif kind == "rebuild":
        return [seq for seq in state.sequences if seq[0] in numbers]
    else:
        seq = values[0] if values else None
    return [seq] if kind in _TOLD and seq[0] in numbers else []


_TOLD = frozenset(
    {"admit", "resume", "hit", "depart", "read", "prefill", "verify", "force", "fork", "wait"}
    | {"preempt", "finish", "copy", "export", "import", "drop"}
)


def _event(record: Record, seq: Seq, state: State, decode: Decode | None) -> str:
    """Return the text of a record about a sequence, given the state before it."""
    match record:
        case ("add", _, _, _, num_prompt, n, _):
            choices = f" for {n} choices" if n > 1 else ""
            return f"waits with a prompt of {count(num_prompt, 'token')}{choices}"
        case ("read", _, host, num_tokens):
            return f"{count(num_tokens, 'token')} in {count(len(host), 'block')} read from a disk"
        case ("depart", _, position, reason, cached, got, _):
            of = state.sequences[seq].num_tokens
            text = f"departs from the cache at token {position:,} of {of:,}: {reason}"
            return f"{text}; {_difference(cached, got, decode)}" if cached else text
        case ("hit", _, num_queried, num_full, num_partial, source):
            copied = "" if source is None else f", {num_partial:,} of them by a copy"
            return f"{num_full + num_partial:,} of {num_queried:,} tokens were cached{copied}"
        case ("admit", *_):
            return "runs"
        case ("resume", _, _, num_tokens, num_computed, mode):
            return f"runs again after {mode}, with {num_computed:,} of {num_tokens:,} tokens"
        case ("prefill", _, start, num_new, choices):
            first = " and gets a token" if choices else ""
            return f"computes {count(num_new, 'token')} from token {start:,} on{first}"
        case ("verify", _, _, num_drafts, num_accepted):
            drafts = count(num_drafts, "draft")
            return f"gets {count(num_accepted + 1, 'token')}: {num_accepted} of {drafts} are kept"
        case ("force", _, num_new):
            return f"gets {count(num_new, 'token')} that alone could follow"
        case ("fork", *_):
            return "forks from the first choice"
        case ("wait", *_):
            return "waits as a further choice"
        case ("preempt", _, by, mode, rule, num_lost):
            whose = "a step that was abandoned" if by is None else title_of(by, state)
            return f"is preempted for {whose} ({rule}; {mode}; {count(num_lost, 'token')} lost)"
        case ("copy", source, target, _, cause):
            return f"block {source} is copied to block {target} ({cause})"
        case ("export", _, host):
            return f"{count(len(host), 'block')} saved to the host"
        case ("import", _, _, blocks):
            return f"{count(len(blocks), 'block')} copied from the host"
        case ("drop", _):
            return "its blocks on the host are freed"
        case ("finish", _, reason):
            return f"ends: {reason}"
    return "waits again, because a step was abandoned"


def _difference(cached: Sequence[int], got: Sequence[int], decode: Decode | None) -> str:
    texts = [[*ids] if decode is None else json.dumps(decode(ids)) for ids in (cached, got)]
    return f"cached {texts[0]}, got {texts[1]}"


def _decoded(seq: Seq, decodes: dict[Seq, list[int | None]]) -> Iterator[str]:
    """Yield the line of the decodes since the last other record."""
    if steps := decodes.pop(seq, []):
        last = "" if len(steps) == 1 else f" up to step {steps[-1]}"
        yield _line(steps[0], seq, f"gets {count(len(steps), 'token')}{last}")


def _line(step: int | None, seq: Seq, text: str) -> str:
    choice = f" [{seq[1]}]" if seq[1] else ""
    return f"{'end' if step is None else step:>8}{choice}  {text}"
