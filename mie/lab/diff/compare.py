"""Run one workload on two backends with the same tokens, and compare every operator's result."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mie.checkpoint.config import load_model_config
from mie.checkpoint.locate import locate_model
from mie.config.engine import EngineConfig, refuse_unknown
from mie.config.params.sampling import SamplingParams
from mie.errors import ConfigError
from mie.lab.diff.recording import Observer, RecordingBackend, Spot
from mie.lab.diff.report import Candidate, DiffReport, OperatorErrors, Place, Side, TokenPart
from mie.lab.diff.tolerances import (
    Index,
    Limits,
    differences,
    errors_between,
    largest_of_rows,
    quotients,
)
from mie.load.backends import SETTINGS, load_backend
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.load.sizing import blocks_needed
from mie.ops.backend import Backend
from mie.ops.sampling import top_logprobs
from mie.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class DiffWorkload:
    """Greedy answers to prompts of token ids, all sent at once.

    A small budget cuts prompts into chunks, so a later prompt runs together with the earlier ones'
    decodes and can use their blocks.
    """

    directory: Path
    model: str
    """The model's name in the report."""
    prompts: Sequence[Sequence[int]]
    token_text: Callable[[int], str] = str
    """Returns the text of a token for the report."""
    max_tokens: int = 8
    block_size: int = 8
    max_num_batched_tokens: int = 8

    def config(self) -> EngineConfig:
        """Return the config, the same for both sides, so it does not depend on their memory.

        Raises:
            ConfigError: a setting is out of range.
            ModelError: the model cannot be used.
        """
        model = load_model_config(self.directory)
        lengths = [len(prompt) + self.max_tokens for prompt in self.prompts]
        config = EngineConfig(
            block_size=self.block_size,
            max_model_len=min(max(lengths, default=1), model.context_length),
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        # Each sequence may copy a block. The source is held until the end of the step.
        num_blocks = blocks_needed(config, model, lengths) + len(lengths) + 1
        return replace(config, num_blocks=num_blocks)

    def params(self, forced: Sequence[int] | None = None) -> SamplingParams:
        """Return the parameters of each request. With ``forced`` its tokens are those."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            trace_decode_token_ids=forced,
        )


def workload_of_texts(model: str, texts: Sequence[str], **settings: int) -> DiffWorkload:
    """Return the workload of text prompts for a model by its name.

    ``settings`` are ``max_tokens``, ``block_size`` and ``max_num_batched_tokens``.

    Raises:
        ModelError: the model or its tokenizer cannot be used.
        RequestError: a text is not valid Unicode.
    """
    directory = locate_model(model)
    tokenizer = Tokenizer.load(directory, load_model_config(directory).vocab_size)
    return DiffWorkload(
        directory=directory,
        model=model,
        prompts=[tokenizer.encode(text) for text in texts],
        token_text=tokenizer.token_str,
        **settings,
    )


NUM_TOP = 5
"""Number of candidates that are shown where the tokens differ."""


@dataclass(kw_only=True)
class _Run:
    """The results of the workload on one side."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    rows: list[list[tuple[str, int]]] = field(default_factory=list)
    """For each step, the owner of each row of logits: (request id, index of the answer's token)."""
    greedy: list[list[int]] = field(default_factory=list)
    """For each step and row, the token of the largest logit."""
    coverage: dict[str, int] = field(default_factory=dict)
    """The counts of cases in the schedule, by the field names of `DiffReport`."""


def compare(
    workload: DiffWorkload,
    a: Side,
    b: Side,
    *,
    isolate: bool = False,
    on_side: Callable[[str, Side], object] = lambda name, side: None,
) -> DiffReport:
    """Compare ``b`` with the reference ``a``.

    A runs freely and B is forced to A's tokens, with the same prompts and the same schedule, so
    every call has its counterpart. With ``isolate`` each result of B is replaced by A's after the
    comparison, so every operator gets A's inputs. ``on_side`` is called with ("A" or "B", side)
    before each run.

    Raises:
        ConfigError: a side is unknown or has a setting of another backend.
        ModelError: the model cannot be used.
        RequestError: a prompt cannot be served.
    """
    # Problems with the settings, or with B, are reported before A runs.
    workload.params()
    _check_activations(a, b, isolate)
    for side in (a, b):
        load_backend(side.backend, side.dtype, _config(workload, side))
    recorded: dict[Spot, NDArray[Any]] = {}
    on_side("A", a)
    free = _run(workload, a, recorded.__setitem__)
    limits = Limits(kv_cache_dtypes=(a.kv_cache_dtype, b.kv_cache_dtype), isolated=isolate)
    comparison = _Comparison(recorded, limits)
    on_side("B", b)
    forced = _run(workload, b, comparison.observe, free.tokens)
    assert free.rows == forced.rows, "the two sides were scheduled differently"
    assert comparison.num_calls == len(recorded), "the two sides made different calls"
    return DiffReport(
        model=workload.model,
        a=a,
        b=b,
        isolated=isolate,
        num_prompts=len(workload.prompts),
        num_steps=len(free.rows),
        num_tokens=sum(map(len, free.tokens.values())),
        **free.coverage,
        reason=comparison.reason,
        rows=tuple(comparison.rows.values()),
        first=comparison.first,
        tokens=tuple(comparison.token_parts(free, forced, workload.token_text)),
    )


def _check_activations(a: Side, b: Side, isolate: bool) -> None:
    """Raise `ConfigError` if rounded activations have no limits in this comparison."""
    rounds = [side.settings.get("activations") == "int8" for side in (a, b)]
    if any(rounds) and not (all(rounds) and isolate):
        raise ConfigError(
            "activations is 'int8' and has limits only with isolate and on both sides: a small "
            "difference of two sides becomes another code, and so a large one (use --isolate "
            "--set-a activations=int8 --set-b activations=int8)"
        )


def _run(
    workload: DiffWorkload,
    side: Side,
    observe: Observer,
    forced: dict[str, list[int]] | None = None,
) -> _Run:
    """Run the workload on one side, with the tokens in ``forced`` if given."""
    recorders: list[RecordingBackend] = []

    def wrap(backend: Backend) -> Backend:
        recorders.append(RecordingBackend(backend, observe))
        return cast(Backend, recorders[0])  # it delegates the rest of the contract

    settings = LoadSettings(engine=_config(workload, side), backend=side.backend, dtype=side.dtype)
    engine = load_engine(workload.directory, settings, wrap=wrap)
    run, sequences = _Run(), {}
    for number, prompt in enumerate(workload.prompts):
        request_id = str(number)
        params = workload.params(None if forced is None else forced[request_id])
        [sequence] = engine.add_request(prompt, params, request_id).sequences
        sequences[request_id] = sequence
    kinds = []
    while engine.has_work:
        step = engine.step()
        # In the order of the rows of logits. A row gives one token.
        run.rows.append([(each, sequences[each].num_generated - 1) for each in step.request_ids])
        run.greedy.append(recorders[0].greedy)
        kinds.append((step.stats.num_prefill_tokens > 0, step.stats.num_decode_tokens > 0))
    run.tokens = {each: sequence.output_ids for each, sequence in sequences.items()}
    memory = engine.stats.memory
    run.coverage = {
        "num_cached_tokens": memory.num_hit_tokens + memory.num_partial_hit_tokens,
        "num_copies": memory.num_copies,
        "num_prefill_steps": sum(prefill for prefill, _ in kinds),
        "num_decode_steps": sum(decode for _, decode in kinds),
        "num_mixed_steps": kinds.count((True, True)),
    }
    return run


def _config(workload: DiffWorkload, side: Side) -> EngineConfig:
    """Return the workload's config with the side's settings. They must not change the schedule."""
    if side.backend == "auto":
        raise ConfigError("a comparison needs the name of a backend; got 'auto' (jit or numpy)")
    own = SETTINGS.get(side.backend, ())
    refuse_unknown(f"the {side.backend} backend", side.settings, own)
    eager = {"enforce_eager": True} if "enforce_eager" in own else {}
    return replace(workload.config(), **{**side.settings, **eager})


class _Comparison:
    """Compares each of B's calls with A's."""

    def __init__(self, recorded: dict[Spot, NDArray[Any]], limits: Limits) -> None:
        self.first: Place | None = None
        self.reason = ""
        self.num_calls = 0
        self._recorded = recorded
        self._limits = limits
        self.rows: dict[tuple[str, int | None], OperatorErrors] = {}
        """The errors by operator and layer, in the order of the calls."""
        self._logits: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def observe(self, spot: Spot, b: NDArray[Any]) -> NDArray[Any] | None:
        """Compare a call of B with A's. Return A's result if B is to continue with it."""
        a = self._recorded[spot]
        limit = self._limits.of(a.dtype, b.dtype, spot.operator)
        errors = errors_between(a, b, limit)
        row = OperatorErrors(
            operator=spot.operator,
            layer=spot.layer,
            limit=limit,
            worst=_place(spot, errors.worst, a, b),
            max_abs=errors.max_abs,
            max_rel=errors.max_rel,
            row_rel=errors.row_rel,
            max_ulp=errors.max_ulp,
        )
        known = self.rows.get((spot.operator, spot.layer))
        self.rows[spot.operator, spot.layer] = row if known is None else known.merged(row)
        if self.first is None and errors.first is not None:
            self.first = _place(spot, errors.first, a, b)
        if spot.operator == "logits":
            self._logits.append((a, b))
        self.reason = self._limits.reason(a.dtype, b.dtype)
        self.num_calls += 1
        return a if self._limits.isolated and spot.operator != "logits" else None

    def token_parts(
        self, free: _Run, forced: _Run, token_text: Callable[[int], str]
    ) -> Iterator[TokenPart]:
        """Return the tokens that the two sides would have chosen differently."""
        for step, (owners, (a, b)) in enumerate(zip(free.rows, self._logits, strict=True)):
            for row, (request_id, token) in enumerate(owners):
                of_a, of_b = free.greedy[step][row], forced.greedy[step][row]
                if of_a != of_b:
                    yield TokenPart(
                        prompt=int(request_id),
                        token=token,
                        step=step + 1,
                        a=_candidates(a[row], of_a, token_text),
                        b=_candidates(b[row], of_b, token_text),
                        is_near_tie=self._is_near_tie(a[row], of_a, of_b, b.dtype),
                    )

    def _is_near_tie(self, a: NDArray[Any], of_a: int, of_b: int, dtype: np.dtype[Any]) -> bool:
        """Return whether errors within the limit can swap two tokens of a row [V] of A's logits."""
        logits = a.astype(np.float64)
        gap = abs(float(logits[of_a] - logits[of_b]))
        return gap <= 2 * self._limits.of(a.dtype, dtype, "logits") * float(np.abs(logits).max())


def _place(spot: Spot, element: Index, a: NDArray[Any], b: NDArray[Any]) -> Place:
    """Return both sides at an element. The element of an empty result is ()."""
    where: dict[str, Any] = {"step": spot.step, "layer": spot.layer, "operator": spot.operator}
    if not element:
        return Place(**where, element=element)
    place = np.ravel_multi_index(element[1:], a.shape[1:])
    x, y = (each[element[:1]].astype(np.float64).reshape(1, -1) for each in (a, b))
    relative = quotients(differences(x, y), largest_of_rows(x))
    return Place(
        **where,
        element=element,
        a=float(x[0, place]),
        b=float(y[0, place]),
        relative=float(relative[0, place]),
    )


def _candidates(
    logits: NDArray[Any], chosen: int, token_text: Callable[[int], str]
) -> tuple[Candidate, ...]:
    ids, logprobs, _ = top_logprobs(logits.astype(np.float64), chosen, NUM_TOP)
    return tuple(
        Candidate(token_id=i, text=token_text(i), logprob=logprob)
        for i, logprob in zip(ids, logprobs, strict=True)
    )
