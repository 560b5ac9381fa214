"""The settings of an engine, and the checks that all settings share."""

import difflib
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from mie.errors import ConfigError

T = TypeVar("T")


def refuse_unknown(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` for the first of ``names`` that is not ``known``, with a suggestion."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
            raise ConfigError(f"{what} has no parameter {name!r}; {hint}")


def keyword_checked(cls: type[T]) -> type[T]:
    """Class decorator for a keyword-only dataclass: an unknown keyword raises `ConfigError`."""
    original = cls.__init__
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # cls is a dataclass

    @functools.wraps(original)
    def __init__(self: T, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, known)
        original(self, **kwargs)

    cls.__init__ = __init__  # type: ignore[assignment]  # the same keywords, checked first
    return cls


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise `ConfigError` unless ``value`` is an integer in low … high."""
    is_integer = _is(Integral, value)
    if not is_integer or value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"in {low} … {high}"
        raise ConfigError(f"{name} must be an integer {allowed}; got {value!r}")


def check_real(
    name: str, value: Any, low: float, high: float = math.inf, *, above_low: bool = False
) -> None:
    """Raise `ConfigError` unless ``value`` is a finite number in low … high (or above low)."""
    # An integer may be too large for a float; comparing it with one is exact all the same.
    is_number = _is(Real, value) and value == value and abs(value) != math.inf
    if not is_number or not low <= value <= high or (above_low and value == low):
        bracket = "(" if above_low else "["
        allowed = f"in {bracket}{low:g}, {high:g}]".replace("inf]", "inf)")
        raise ConfigError(f"{name} must be a number {allowed}; got {value!r}")


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_switch(name: str, value: object) -> None:
    """Raise `ConfigError` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False; got {value!r}")


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How large an engine is and what it may do in one step. None: chosen from the model.

    The KV cache is ``num_blocks`` blocks of ``block_size`` tokens, or as many blocks as fit
    ``kv_cache_memory_bytes``; a step computes at most ``max_num_batched_tokens`` tokens, decodes
    included, of at most ``max_num_seqs`` sequences.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            check_integer(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_blocks", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        check_switch("enable_prefix_caching", self.enable_prefix_caching)
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "num_blocks and kv_cache_memory_bytes both size the KV cache; give one"
            )
