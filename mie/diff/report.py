"""What a comparison found, as plain data."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Side:
    """A backend and what it computes in."""

    backend: str
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `EngineConfig`, and the backend's own."""

    def __str__(self) -> str:
        return " ".join([self.backend, self.dtype, *(f"{k}={v}" for k, v in self.settings.items())])

    @property
    def kv_cache_dtype(self) -> str:
        return str(self.settings.get("kv_cache_dtype", "auto"))


@dataclass(frozen=True, kw_only=True)
class Place:
    """One element of one operator's result, on both sides."""

    step: int
    layer: int | None
    operator: str
    element: tuple[int, ...]
    a: float
    b: float
    relative: float
    """Their difference over the largest magnitude in that row of A's result."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}, "
        return f"step {self.step}, {layer}{self.operator}, element {list(self.element)}"


@dataclass(frozen=True, kw_only=True)
class OperatorErrors:
    """The largest differences of an operator in a layer, over all steps."""

    operator: str
    layer: int | None
    num_calls: int
    max_abs: float
    max_rel: float
    """Over the largest magnitude of the whole result;"""
    row_rel: float
    """over that of the row, one token's: this is judged."""
    max_ulp: int
    limit: float
    """What ``row_rel`` may be."""
    worst: Place
    """Where ``row_rel`` is."""

    @property
    def is_within(self) -> bool:
        return self.row_rel <= self.limit

    @property
    def share(self) -> float:
        """How much of its limit it takes."""
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
    """Counted from 0, as is"""
    token: int
    """of the answer."""
    step: int
    a: tuple[Candidate, ...]
    """A's choice first, then the most likely ones."""
    b: tuple[Candidate, ...]
    is_near_tie: bool
    """The two logits lie closer together on A than the tolerance can tell apart."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Two sides compared, over one workload."""

    model: str
    a: Side
    b: Side
    inject: str | None
    isolated: bool
    """Each operator of B had A's results as its inputs."""
    num_prompts: int
    num_steps: int
    num_tokens: int
    """Generated ones, all of A's choice and forced on B."""
    num_cached_tokens: int
    """Tokens of prompts that were found in the prefix cache."""
    num_copies: int
    """Blocks that were copied to share their beginning."""
    num_prefill_steps: int
    """Steps that computed tokens of prompts;"""
    num_decode_steps: int
    """of answers; and"""
    num_mixed_steps: int
    """of both."""
    reason: str
    """Why the limits are what they are."""
    rows: tuple[OperatorErrors, ...]
    """In the order of the first step's calls."""
    first: Place | None
    """The first call, and in it the first element, past its limit."""
    tokens: tuple[TokenPart, ...]
    """Where the sides would have chosen differently, in order."""

    @property
    def is_within(self) -> bool:
        """Nothing is past its limit, and tokens differ by near-ties only."""
        return self.first is None and all(part.is_near_tie for part in self.tokens)

    @property
    def worst_layers(self) -> list[OperatorErrors]:
        """For each operator, the layer where it comes closest to its limit or furthest past it."""
        worst: dict[str, OperatorErrors] = {}
        for row in self.rows:
            known = worst.get(row.operator)
            if known is None or row.share > known.share:
                worst[row.operator] = row
        return list(worst.values())

    def as_json(self) -> dict[str, Any]:
        """For programs; numbers that JSON does not have are strings."""
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
