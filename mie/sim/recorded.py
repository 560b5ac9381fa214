"""Extract the load from an event log, with the work and the time of each step."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mie.base.arithmetic import ceil_div
from mie.errors import TraceError
from mie.events import Record, Segment, Seq, Summary
from mie.events.replay import SequenceState, State, walk
from mie.sim.costs import SECOND, StepWork, causal_pairs
from mie.sim.metrics import RequestRecord
from mie.sim.workload import Part, Text, Tokens, Workload, WorkloadRequest

MAX_PROMPT_TOKENS = 1 << 24
"""Maximum for all requests together, because a simulation creates every token of the file."""


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """The work of a step, and the time until the next one could begin."""

    work: StepWork
    duration_ns: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A run of the real engine."""

    workload: Workload
    """The load of the run: arrivals, prompt lengths, and numbers of generated tokens."""
    steps: list[RecordedStep]
    records: list[RequestRecord]
    """The records that `mie.sim.driver.run_load` makes.

    A request arrives with the step that first sees it, because the log has no other time.
    """
    block_size: int
    num_blocks: int
    num_host_blocks: int
    num_states: tuple[int, int]
    """Slots of recurrent states on the device and on the host; (0, 0) if there are none."""
    has_windows: bool
    """Whether blocks behind a window are freed."""

    @property
    def num_blocks_of_all(self) -> int:
        """The number of blocks for every sequence at once, with one more each for copies."""
        size = self.block_size
        return sum(
            (ceil_div(record.num_prompt + len(times), size) + 2)
            for record in self.records
            for times in record.token_ns
        )

    @property
    def duration_ns(self) -> int:
        """Time from the first step's beginning to the last one's end."""
        return max((record.end_ns or 0 for record in self.records), default=0)


def recording_of(segments: Iterable[Segment], name: str = "recorded") -> Recording:
    """Read the recording from a log.

    Prompts are recorded where their blocks were sealed for the prefix cache. Other tokens become a
    text that nothing else shares. For turns that wait for an answer, only their arrival time is
    known.

    Raises:
        TraceError: the log contradicts itself, or none of its steps computed anything.
    """
    reader = _Reader()
    for summary, record, state in walk(segments):
        reader.meet(summary, record, state)
        reader.sizes = (state.blocks.block_size, state.blocks.num_blocks, state.num_host_blocks)
        if state.slots is not None:
            reader.num_states = (state.slots.num_slots, state.slots.num_host_slots)
    if reader.sizes is None or not reader.steps:
        raise TraceError("the log has no step that computed anything")
    block_size, num_blocks, num_host_blocks = reader.sizes
    seen = [life for life in reader.lives.values() if life.record.num_output]
    return Recording(
        workload=Workload(name=name, requests=tuple(life.request() for life in seen)),
        steps=reader.durations(),
        records=[life.record for life in seen],
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        num_states=reader.num_states,
        has_windows=reader.has_windows,
    )


@dataclass(kw_only=True)
class _Life:
    """The record of a request so far."""

    number: int
    record: RequestRecord
    n: int
    tokens: tuple[int, ...] = ()
    """Tokens of its prompt's full blocks."""

    def request(self) -> WorkloadRequest:
        num_rest = self.record.num_prompt - len(self.tokens)
        parts: list[Part] = [Tokens(self.tokens)] if self.tokens else []
        if num_rest:
            parts.append(Text(1 + self.number, num_rest))
        return WorkloadRequest(
            request_id=str(self.number),  # ids of a recording may be in use twice
            prompt=tuple(parts),
            max_tokens=max(map(len, self.record.token_ns)),
            arrival_ns=self.record.arrival_ns,
            n=self.n,
        )


class _Reader:
    """Reads the records of a log."""

    def __init__(self) -> None:
        self.lives: dict[int, _Life] = {}
        self.steps: list[tuple[StepWork, Summary]] = []
        self.sizes: tuple[int, int, int] | None = None
        self.num_states = (0, 0)
        self.has_windows = False
        self._began: int | None = None
        self._num_prompt = 0
        self._work: Counter[str] = Counter()
        """The work of the step that is being read, by the names of `StepWork`."""
        self._drawn: list[Seq] = []
        """The sequences that got a token in it."""

    def meet(self, summary: Summary | None, record: Record, state: State) -> None:
        """Process a record. ``state`` is the state before it."""
        if summary is None:
            return  # belongs to a step that has not ended
        start = self._since(summary["start"])
        match record:
            case ("add", _, number, _, num_prompt, n, _):
                self._add(number, num_prompt, n, start)
            case ("admit", (number, 0), _, _, num_computed) if number in self.lives:
                self.lives[number].record.num_cached = num_computed
            case ("preempt", (number, _), *_) if number in self.lives:
                self.lives[number].record.num_preemptions += 1
            case ("decode", rows):
                self._decode(rows, state)
            case ("force", seq, count):
                self._drawn += [seq] * count
            case ("prefill", seq, first, count, choices):
                self._prefill(seq, first, first + count, choices, start)
            case ("close", (number, 0)) if number in self.lives:
                self._read_prompt(self.lives[number], state.sequences[number, 0], state)
            case ("alloc_window", *_):
                self.has_windows = True
            case ("step", _):
                self._end_step(summary, state)

    def _since(self, seconds: float) -> int:
        moment = round(seconds * SECOND)
        if self._began is None:
            self._began = moment
        return moment - self._began

    def _add(self, number: int, num_prompt: int, n: int, start: int) -> None:
        self._num_prompt += num_prompt
        if num_prompt < 1 or self._num_prompt > MAX_PROMPT_TOKENS:
            raise TraceError(
                f"request {number} has a prompt of {num_prompt} tokens; a prompt has at least one, "
                f"and those of a recording have at most {MAX_PROMPT_TOKENS:,} together"
            )
        record = RequestRecord(
            request_id=str(number),
            num_prompt=num_prompt,
            arrival_ns=start,
            token_ns=[[] for _ in range(n)],
        )
        self.lives[number] = _Life(number=number, record=record, n=n)

    def _decode(self, rows: tuple[int, ...], state: State) -> None:
        seqs = [state.rows[row] for row in rows]
        self._work["num_tokens"] += len(rows)
        self._work["num_sampled"] += len(rows)
        self._work["num_context"] += sum(state.sequences[seq].num_computed + 1 for seq in seqs)
        self._work["num_seqs"] += len(rows)
        self._drawn += seqs

    def _prefill(
        self, seq: Seq, start: int, end: int, choices: tuple[int, ...], step_start: int
    ) -> None:
        number = seq[0]
        self._work.update(
            num_tokens=end - start,
            num_sampled=len(choices),
            num_pairs=causal_pairs(start, end),
            num_context=end,
            num_seqs=1,
            num_chunks=1,
        )
        self._drawn += [(number, choice) for choice in choices]
        if number in self.lives and self.lives[number].record.first_step_ns is None:
            self.lives[number].record.first_step_ns = step_start

    def _read_prompt(self, life: _Life, values: SequenceState, state: State) -> None:
        """Keep the tokens of the prompt's full blocks, if all are in the prefix tree."""
        size = state.blocks.block_size
        nodes = map(state.blocks.tree.get, values.blocks[: values.num_prompt // size])
        tokens = [node.tokens if node else () for node in nodes]
        if all(tokens):
            life.tokens = max(life.tokens, tuple(t for block in tokens for t in block), key=len)

    def _end_step(self, summary: Summary, state: State) -> None:
        counts, self._work = self._work, Counter()
        drawn, self._drawn = self._drawn, []
        end = self._since(summary["start"] + summary["seconds"])
        for number, choice in drawn:
            if number in self.lives:
                self.lives[number].record.token_ns[choice].append(end)
        size = state.blocks.block_size
        counts["num_copied"] = summary["num_copies"] * size
        counts["num_swapped"] = (summary["num_exported"] + summary["num_imported"]) * size
        if counts["num_tokens"]:
            work = StepWork(**{name: counts[name] for name in StepWork._fields})
            self.steps.append((work, summary))

    def durations(self) -> list[RecordedStep]:
        """Return each step with the time from its start to the next one's start.

        The time between steps (returning tokens, writing the log) costs a load as much. Where there
        was no work afterwards, the time is to the step's own end.
        """
        steps = []
        for at, (work, summary) in enumerate(self.steps):
            seconds = summary["seconds"]
            has_work = summary["num_running"] or summary["num_waiting"]
            if has_work and at + 1 < len(self.steps):
                seconds = self.steps[at + 1][1]["start"] - summary["start"]
            if seconds < 0:
                raise TraceError(f"step {summary['step']} starts after the next one")
            steps.append(RecordedStep(work=work, duration_ns=round(seconds * SECOND)))
        return steps
