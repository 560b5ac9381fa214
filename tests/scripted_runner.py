"""Provide a runner without a model, which knows the right contents of every slot.

Where a model would store keys and values, it stores one number for the whole history up to the
token, and draws the next token from that number. So it notices a stale, missing or wrongly shared
slot in the step that reads it. The expected output is known under any schedule (`expected_tokens`).
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.engine import Engine
from mie.engine.overlap import OverlappingRunner
from mie.engine.runner import Launched
from mie.engine.watch.metrics import EngineMetrics
from mie.events import EventLog
from mie.load.engine import new_scheduler
from mie.memory.table import Moves
from mie.sched.plan import Chunk, NewRow, StepPlan
from mie.sched.result import ChunkResult, StepResult, TokenLogprobs

VOCAB_SIZE = 50
EOS = 3
POISON = None
"""The content of a slot that was never written."""

Blocks = list[list[int | None]]


def salt_seed(salt: str | None) -> int | None:
    """Return the seed of a request with this salt.

    A plan names no salts. The history of a request therefore begins with its seed, so that a block
    shared across salts is noticed.
    """
    return None if salt is None else int.from_bytes(salt.encode(), "big")


def histories(seed: int | None, token_ids: Iterable[int], before: int | None = None) -> list[int]:
    """Return a number for each token that represents it and all tokens before it."""
    history = hash((seed or 0, 0)) if before is None else before
    numbers = []
    for token_id in token_ids:
        history = hash((history, token_id))
        numbers.append(history)
    return numbers


def next_token(history: int, choice: int, vocab_size: int = VOCAB_SIZE) -> int:
    """Return the token that follows a history."""
    return hash((history, choice, 1)) % vocab_size


def expected_tokens(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    choice: int = 0,
    limit: int,
    eos: Sequence[int] = (EOS,),
    vocab_size: int = VOCAB_SIZE,
) -> tuple[list[int], str]:
    """Return the output of one choice and its finish reason.

    The prompt and the answer together have at most ``limit`` tokens.
    """
    most = limit - len(prompt)
    if params.max_tokens is not None:
        most = min(most, params.max_tokens)
    ends = {*(() if params.ignore_eos else eos), *(params.stop_token_ids or ())}
    history = histories(params.seed, prompt)[-1]
    output: list[int] = []
    while True:
        output.append(next_token(history, choice, vocab_size))
        if output[-1] in ends:
            return output, "stop"
        if len(output) >= most:
            return output, "length"
        (history,) = histories(params.seed, output[-1:], history)


def answer_to(plan: StepPlan, draw: Callable[[], int]) -> StepResult:
    """Return the answer of a stateless model, whose tokens ``draw`` returns."""
    chunks = []
    for chunk in plan.chunks:
        token_ids = [draw() for _ in chunk.choices]
        for draft in chunk.drafts:
            if token_ids[-1] == draft:
                token_ids.append(draw())
        chunks.append(
            ChunkResult(
                token_ids=token_ids,
                logprobs=[None] * len(token_ids),
                scored=_scores(chunk, [*chunk.token_ids[1:], 0]),
            )
        )
    decoded = [draw() for _ in plan.decodes]
    return StepResult(token_ids=decoded, logprobs=[None] * len(decoded), chunks=chunks)


def _scores(chunk: Chunk, following: Sequence[int]) -> list[TokenLogprobs]:
    """Return a log-probability for each scored position, which identifies the position.

    ``following`` are the tokens after those of the chunk's positions.
    """
    return [
        TokenLogprobs(token_ids=[following[at - chunk.start]], logprobs=[-float(at)], rank=1)
        for at in range(*chunk.scored)
    ]


class _Row:
    """The runner's state of one running sequence."""

    def __init__(self, new: NewRow) -> None:
        self.choice = new.choice
        self.seed = new.params.seed
        self.token_ids = list(new.token_ids)
        self.histories = histories(self.seed, self.token_ids)
        self.num_stored = new.num_computed
        self.slot = -1
        self._new = new
        self.block_ids: list[int] = []

    def is_end(self, token_id: int, num_tokens: int) -> bool:
        return token_id in self._new.banned_ids or num_tokens >= self._new.max_tokens

    def take_forced(self, draw: Callable[[], int], most: int) -> tuple[int, ...]:
        """Append some drawn tokens. Log-probabilities are given with the last one, not after it."""
        start, has_logprobs = len(self.token_ids), self._new.params.logprobs is not None
        is_over = self.is_end(self.token_ids[-1], start)
        limit = start + most
        while self.histories[-1] % 3 == 0 and len(self.token_ids) < limit and not is_over:
            token_id = draw()
            is_over = self.is_end(token_id, len(self.token_ids) + 1)
            if is_over and has_logprobs:
                break
            self.append(token_id)
        return tuple(self.token_ids[start:])

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.histories += histories(self.seed, [token_id], self.histories[-1])

    def update(self, index: int, block_ids: Sequence[int]) -> None:
        missing = index - len(self.block_ids)
        self.block_ids += [-1] * missing  # from a former owner of the row in the same step
        self.block_ids[index : index + len(block_ids)] = block_ids


class ScriptedRunner:
    """Replaces `ModelRunner`, and raises AssertionError for a slot with the wrong content.

    ``live_rows`` returns the rows that run, because a plan does not say which sequences have left.
    """

    is_ahead = False

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        live_rows: Callable[[], Iterable[int | None]],
        num_host_blocks: int = 0,
        num_states: tuple[int, int] = (0, 0),
        vocab_size: int = VOCAB_SIZE,
        max_forced_run: int = 32,
    ) -> None:
        self._max_forced_run = max_forced_run
        self._block_size = block_size
        self._device: Blocks = [[POISON] * block_size for _ in range(num_blocks)]
        self._host: Blocks = [[POISON] * block_size for _ in range(num_host_blocks)]
        # A state is the history of the tokens that it has seen.
        self._states, self._host_states = ([POISON] * number for number in num_states)
        self.num_computed = 0
        """The number of tokens computed so far."""
        self._rows: dict[int, _Row] = {}
        self._live_rows = live_rows
        self._vocab_size = vocab_size

    def run(self, plan: StepPlan) -> StepResult:
        """Move blocks, check everything that is read, write, and draw the next tokens.

        Some tokens are followed by others that are forced, and are those that would be drawn.
        """
        self.prepare(plan)
        result = self.compute(plan)
        rows = [*plan.decodes, *(chunk.row for chunk in plan.chunks if chunk.choices)]
        runs = {row: self._take_forced(self._rows[row]) for row in rows}
        return replace(result, forced={row: run for row, run in runs.items() if run})

    def prepare(self, plan: StepPlan) -> None:
        """Bring rows, tables and blocks to the state that the plan requires."""
        for new in plan.new_rows:
            self._rows[new.row] = _Row(new)
        moves = plan.moves
        for row, index, block_ids in moves.updates:
            if row in self._rows:
                self._rows[row].update(index, block_ids)
        for block_id, host_id in moves.exports:
            self._host[host_id] = self._device[block_id][:]
        for host_id, block_id in moves.imports:
            self._device[block_id] = self._host[host_id]
            self._host[host_id] = [POISON] * self._block_size  # The host's block is free.
        sources = [self._device[source][:] for source, _ in moves.copies]
        for (_, target), content in zip(moves.copies, sources, strict=True):
            self._device[target] = content
        targets = [target for _, target in moves.copies]
        assert len(set(targets)) == len(targets), "a block is the target of two copies"
        if states := moves.parts.get("states"):
            self._move_states(states)

    def _move_states(self, moves: Moves) -> None:
        for row, _, slots in moves.updates:
            if row in self._rows:
                self._rows[row].slot = slots[0]
        for slot, host_slot in moves.exports:
            self._host_states[host_slot] = self._states[slot]
        found = [self._states[source] for source, _ in moves.copies]
        for (_, target), state in zip(moves.copies, found, strict=True):
            self._states[target] = state
        for host_slot, slot in moves.imports:
            self._states[slot], self._host_states[host_slot] = self._host_states[host_slot], POISON

    def compute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's decodes and chunks."""
        rows = [*plan.decodes, *(chunk.row for chunk in plan.chunks)]
        assert list(plan.decodes) == sorted(plan.decodes), "decodes do not ascend"
        assert len(set(rows)) == len(rows), "a row is computed twice in one step"
        assert {*rows} <= {*self._live_rows()}, "a row is computed that does not run"
        for row in rows:
            self._check_stored(self._rows[row])
        self._write(plan)
        self.num_computed += plan.num_tokens
        decoded = [self._decode(self._rows[row]) for row in plan.decodes]
        chunks = [self._prefill(chunk) for chunk in plan.chunks]
        return StepResult(token_ids=decoded, logprobs=[None] * len(decoded), chunks=chunks)

    # `mie.engine.overlap` drives a runner like this: a step writes when it is launched.

    def launch(self, plan: StepPlan) -> Launched:
        return Launched(rows=plan.decodes, logits=None, drawn=self.compute(plan))

    def launch_ahead(self, rows: tuple[int, ...], before: Launched) -> Launched:
        assert {*rows} <= {*before.rows}
        assert not before.drawn.chunks
        plan = StepPlan(step=0, new_rows=(), moves=Moves(), decodes=rows, chunks=(), preempted=())
        return self.launch(plan)

    def collect(self, plan: StepPlan, launched: Launched) -> StepResult:
        tokens = dict(zip(launched.rows, launched.drawn.token_ids, strict=True))
        return StepResult(
            token_ids=[tokens[row] for row in plan.decodes],
            logprobs=[None] * len(plan.decodes),
            chunks=launched.drawn.chunks,
        )

    def discard(self, launched: Launched) -> None:
        pass

    def _check_stored(self, row: _Row) -> None:
        """Check that every slot before the row's next token has the row's own history."""
        size = self._block_size
        for start in range(0, row.num_stored, size):
            wanted = row.histories[start : min(start + size, row.num_stored)]
            block_id = row.block_ids[start // size]
            found = self._device[block_id][: len(wanted)]
            assert found == wanted, (
                f"tokens {start} … {start + len(wanted) - 1} of {row.token_ids} should be in block"
                f" {block_id}; it holds {_describe(found, wanted)}"
            )
        if self._states and row.num_stored:
            wanted, found = row.histories[row.num_stored - 1], self._states[row.slot]
            seen = row.histories.index(found) + 1 if found in row.histories else found
            assert found == wanted, (
                f"slot {row.slot} should have seen {row.num_stored} tokens of {row.token_ids}; it"
                f" has seen {seen}"
            )

    def _write(self, plan: StepPlan) -> None:
        """Store the step's tokens, each in a slot that no other row reads or writes."""
        size, read = self._block_size, self._slots_read()
        written: set[tuple[int, int]] = set()
        ends = [(row, self._rows[row].num_stored + 1) for row in plan.decodes]
        ends += [(chunk.row, chunk.end) for chunk in plan.chunks]
        for index, end in ends:
            row = self._rows[index]
            for position in range(row.num_stored, end):
                block_id, offset = row.block_ids[position // size], position % size
                assert offset >= read.get(block_id, 0), (
                    f"slot {offset} of block {block_id} is written, and others still read it"
                )
                assert (block_id, offset) not in written, (
                    f"slot {offset} of block {block_id} is written twice in one step"
                )
                written.add((block_id, offset))
                self._device[block_id][offset] = row.histories[position]
            if self._states:
                self._states[row.slot] = row.histories[end - 1]

    def _slots_read(self) -> dict[int, int]:
        """Return how many slots of each block some running row reads."""
        size = self._block_size
        read: dict[int, int] = {}
        for index in self._live_rows():
            row = self._rows.get(index)
            if row is not None:
                for start in range(0, row.num_stored, size):
                    block_id = row.block_ids[start // size]
                    read[block_id] = max(read.get(block_id, 0), min(size, row.num_stored - start))
        return read

    def _decode(self, row: _Row) -> int:
        assert row.num_stored == len(row.token_ids) - 1, "a decode has one token to compute"
        row.num_stored += 1
        row.append(next_token(row.histories[-1], row.choice, self._vocab_size))
        return row.token_ids[-1]

    def _take_forced(self, row: _Row) -> tuple[int, ...]:
        return row.take_forced(
            lambda: next_token(row.histories[-1], row.choice, self._vocab_size),
            self._max_forced_run,
        )

    def _prefill(self, chunk: Chunk) -> ChunkResult:
        row = self._rows[chunk.row]
        assert chunk.start == row.num_stored, "tokens are skipped or computed twice"
        assert chunk.token_ids == tuple(row.token_ids[chunk.start : chunk.end])
        assert chunk.token_ids, "an empty chunk"
        row.num_stored = chunk.end
        scored = _scores(chunk, row.token_ids[chunk.start + 1 :])
        assert not scored or chunk.start <= chunk.scored[0] < chunk.scored[1] <= chunk.end
        drawn = []
        if chunk.choices:
            assert chunk.end == len(row.token_ids), "sampled before the last token"
            assert chunk.choices[0] == row.choice
            history = row.histories[-1]
            drawn = [next_token(history, choice, self._vocab_size) for choice in chunk.choices]
            row.append(drawn[0])
        return ChunkResult(token_ids=drawn, logprobs=[None] * len(drawn), scored=scored)


def _describe(found: Sequence[int | None], wanted: Sequence[int]) -> list[str]:
    names = {True: "right", False: "another history"}
    return ["nothing" if f is POISON else names[f == w] for f, w in zip(found, wanted, strict=True)]


def scripted_engine(
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    num_host_blocks: int = 0,
    num_states: tuple[int, int] = (0, 0),
    clock: Callable[[], float] = time.perf_counter,
    on_schedule: Callable[[], object] | None = None,
    on_run: Callable[[], object] | None = None,
) -> Engine:
    """Return an engine with the scripted model. Its vocabulary has `VOCAB_SIZE` ids and `EOS`.

    ``on_schedule`` and ``on_run`` are called when a step is planned and when it runs.
    """
    log = EventLog(config.event_log_steps)
    scheduler = new_scheduler(
        config,
        num_blocks,
        max_model_len,
        log,
        num_host_blocks=num_host_blocks,
        num_states=num_states,
    )
    runner: Any = ScriptedRunner(
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_host_blocks=num_host_blocks,
        num_states=num_states,
        live_rows=lambda: [seq.table.row for seq in scheduler.running],
        max_forced_run=config.max_forced_run,
    )
    if config.async_scheduling:
        runner = OverlappingRunner(runner, scheduler.ahead)
    for part, name, call in ((scheduler, "schedule", on_schedule), (runner, "run", on_run)):
        if call is not None:
            setattr(part, name, _after(call, getattr(part, name)))
    return Engine(
        config,
        scheduler,
        runner,
        log,
        EngineMetrics(max_model_len),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        clock=clock,
    )


def _after(call: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        call()
        return function(*args, **kwargs)

    return called
