"""Hold the results of a comparison as plain data."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Side:
    """A backend and its settings."""

    backend: str
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `EngineConfig` and of the backend."""

    def __str__(self) -> str:
        return " ".join([self.backend, self.dtype, *(f"{k}={v}" for k, v in self.settings.items())])

    @property
    def kv_cache_dtype(self) -> str:
        """The ``kv_cache_dtype`` of the settings, or "auto"."""
        return str(self.settings.get("kv_cache_dtype", "auto"))


@dataclass(frozen=True, kw_only=True)
class Place:
    """One element of one operator's result, on both sides."""

    step: int
    layer: int | None
    operator: str
    element: tuple[int, ...]
    a: float = 0.0
    b: float = 0.0
    relative: float = 0.0
    """Their difference over the largest magnitude in that row of A's result."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}, "
        return f"step {self.step}, {layer}{self.operator}, element {list(self.element)}"


@dataclass(frozen=True, kw_only=True)
class OperatorErrors:
    """The largest differences of an operator in a layer, over all steps."""

    operator: str
    layer: int | None
    num_calls: int = 1
    max_abs: float
    max_rel: float
    """Maximum difference over the largest magnitude of the whole result."""
    row_rel: float
    """Maximum difference over the largest magnitude of the row (one token); it is judged."""
    max_ulp: int
    limit: float
    """Maximum allowed ``row_rel``."""
    worst: Place
    """Where ``row_rel`` occurs."""

    def merged(self, later: "OperatorErrors") -> "OperatorErrors":
        """Return the errors of these calls and of later ones."""
        is_worse = later.row_rel > self.row_rel or not self.worst.element
        return replace(
            self,
            num_calls=self.num_calls + later.num_calls,
            max_abs=max(self.max_abs, later.max_abs),
            max_rel=max(self.max_rel, later.max_rel),
            row_rel=max(self.row_rel, later.row_rel),
            max_ulp=max(self.max_ulp, later.max_ulp),
            worst=later.worst if is_worse else self.worst,
        )

    @property
    def is_within(self) -> bool:
        """Whether ``row_rel`` is within its limit."""
        return self.row_rel <= self.limit

    @property
    def share(self) -> float:
        """``row_rel`` as a fraction of its limit."""
        return self.row_rel / self.limit


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A token that could come next."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """A token that the two sides would choose differently."""

    prompt: int
    """Index of the prompt, from 0."""
    token: int
    """Index of the token in the answer, from 0."""
    step: int
    a: tuple[Candidate, ...]
    """A's choice first, then the most likely ones."""
    b: tuple[Candidate, ...]
    is_near_tie: bool
    """Whether the two logits on A are closer than the tolerance can distinguish."""


@dataclass(frozen=True, kw_only=True)
class DiffReport:
    """The comparison of two sides over one workload."""

    model: str
    a: Side
    b: Side
    isolated: bool
    """Whether each operator of B had A's results as its inputs."""
    num_prompts: int
    num_steps: int
    num_tokens: int
    """Number of generated tokens, all chosen by A and forced on B."""
    num_cached_tokens: int
    """Number of prompt tokens that were found in the prefix cache."""
    num_copies: int
    """Number of blocks that were copied to share their beginning."""
    num_prefill_steps: int
    """Number of steps that computed prompt tokens."""
    num_decode_steps: int
    """Number of steps that computed decodes."""
    num_mixed_steps: int
    """Number of steps that computed both."""
    reason: str
    """The reason for the limits."""
    rows: tuple[OperatorErrors, ...]
    """The errors, in the order of the first step's calls."""
    first: Place | None
    """The first element past its limit in the first such call."""
    tokens: tuple[TokenPart, ...]
    """The tokens that the sides would have chosen differently, in order."""

    @property
    def is_within(self) -> bool:
        """Whether every error is within its limit and tokens differ by near-ties only."""
        return self.first is None and all(part.is_near_tie for part in self.tokens)

    @property
    def worst_layers(self) -> list[OperatorErrors]:
        """Return each operator's layer that is closest to its limit or furthest past it."""
        worst: dict[str, OperatorErrors] = {}
        for row in self.rows:
            known = worst.get(row.operator)
            if known is None or row.share > known.share:
                worst[row.operator] = row
        return list(worst.values())

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs. Numbers that JSON does not have are strings."""
        found: dict[str, Any] = _plain(asdict(self))
        return {"is_within": self.is_within, **found}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
