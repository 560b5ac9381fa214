"""The settings of an engine, and the checks that all settings share."""

import difflib
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from mie.errors import ConfigError
from mie.reprs import changed_repr

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


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise `ConfigError` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


POLICIES = ("fcfs", "priority", "sjf")


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
    max_prefill_chunk: int | None = None
    """Tokens of one prompt that a step computes at most."""
    enable_chunked_prefill: bool = True
    """False: a prompt is computed in one step; it waits until it fits what decodes leave."""
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    partial_block_sharing: bool = True
    """Reuse, by a copy, the beginning of a block too. False: whole blocks only."""
    max_cached_blocks: int | None = None
    """Blocks that the prefix cache keeps at most when nothing else holds them."""
    scheduling_policy: str = "fcfs"
    """"fcfs", "priority" or "sjf" (shortest job first)."""
    sjf_ageing: int | None = None
    """Under sjf, tokens by which a waiting job gets shorter each step (1), so that none starves."""
    batching: str = "continuous"
    """"static": admit only when everything that ran has ended; for comparison."""
    watermark: float = 0.01
    """Share of the blocks that an admission leaves free, unless nothing runs."""
    admit_after_preemption: bool = False
    """Admit in a step that preempted; for comparison."""
    preemption_mode: str = "recompute"
    """"swap": a victim's blocks go to the host and come back."""
    swap_space: int | None = None
    """Bytes of the host's pool; by default 4 GiB, at most a quarter of the free memory."""
    event_log_steps: int = 2000
    """Steps that the event log keeps in memory; 0: none."""
    seed: int = 0
    kv_cache_dtype: str = "auto"
    """"auto" (what the model computes in), "int8" or "fp8": one byte an element, and a scale."""
    async_scheduling: bool | None = None
    """Plan and launch a step of decodes while the one before it runs; a sequence that ends then
    costs one row computed in vain. None: where the backend computes by itself, that is on a GPU."""
    num_threads: int | None = None
    """Threads that compute; by default one for each CPU that the process may use."""
    batch_invariant: bool | str = "auto"
    """True: what a request gets depends on nothing but itself, bit for bit, whatever else runs,
    however it is chunked, cached or preempted. "auto": where that costs next to nothing. On a GPU
    that is its attention alone: cuBLAS may multiply another number of rows in another way."""
    linear_plan: str = "auto"
    """How the CPU keeps matrices: "plain", "tiled", or "auto", what a probe finds faster."""
    weight_dtype: str = "auto"
    """"bfloat16" or "float16": the CPU keeps a checkpoint's matrices as they are, in half the
    memory, and widens them at use, to the same results. "auto": it widens them at load."""
    enforce_eager: bool = False
    """On a GPU, launch every kernel of every step by itself, without CUDA graphs."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that may be in use in the end, by mie and all others; a GPU that
    shares the host's memory leaves as much as a CPU does."""

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            check_integer(name, getattr(self, name), 1)
        for name in (
            "max_model_len",
            "num_blocks",
            "kv_cache_memory_bytes",
            "max_prefill_chunk",
            "swap_space",
            "sjf_ageing",
            "num_threads",
        ):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_real("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, above_low=True)
        if self.max_cached_blocks is not None:
            check_integer("max_cached_blocks", self.max_cached_blocks, 0)
        check_integer("event_log_steps", self.event_log_steps, 0)
        check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        check_real("watermark", self.watermark, 0, 1)
        for name in (
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "partial_block_sharing",
            "admit_after_preemption",
            "enforce_eager",
        ):
            check_switch(name, getattr(self, name))
        if self.async_scheduling is not None:
            check_switch("async_scheduling", self.async_scheduling)
        check_choice("scheduling_policy", self.scheduling_policy, POLICIES)
        if self.batch_invariant != "auto" and not isinstance(self.batch_invariant, bool):
            got = repr(self.batch_invariant)
            raise ConfigError(f"batch_invariant must be True, False or 'auto'; got {got}")
        check_choice("linear_plan", self.linear_plan, ("auto", "plain", "tiled"))
        check_choice("weight_dtype", self.weight_dtype, ("auto", "bfloat16", "float16"))
        check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", "int8", "fp8"))
        check_choice("batching", self.batching, ("continuous", "static"))
        check_choice("preemption_mode", self.preemption_mode, ("recompute", "swap"))
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        """A setting that another makes meaningless is refused, not ignored."""
        swaps = self.preemption_mode == "swap"
        caches = self.enable_prefix_caching
        for is_refused, message in (
            (
                self.num_blocks is not None and self.kv_cache_memory_bytes is not None,
                "num_blocks and kv_cache_memory_bytes both size the KV cache; give one",
            ),
            (
                self.weight_dtype != "auto" and self.linear_plan == "plain",
                f"weight_dtype={self.weight_dtype!r} needs linear_plan='tiled' or 'auto'; got "
                "'plain'",
            ),
            (
                self.swap_space is not None and not swaps,
                "swap_space needs preemption_mode='swap'; got preemption_mode='recompute'",
            ),
            (
                self.sjf_ageing is not None and self.scheduling_policy != "sjf",
                f"sjf_ageing needs scheduling_policy='sjf'; got {self.scheduling_policy!r}",
            ),
            (
                self.admit_after_preemption and swaps,
                "admit_after_preemption needs preemption_mode='recompute': a step that swaps out"
                " cannot also swap in",
            ),
            (
                self.admit_after_preemption and self.batching == "static",
                "admit_after_preemption needs batching='continuous'; got 'static'",
            ),
            (
                self.max_cached_blocks is not None and not caches,
                "max_cached_blocks needs enable_prefix_caching=True; got False",
            ),
            (
                self.max_prefill_chunk is not None and not self.enable_chunked_prefill,
                "max_prefill_chunk needs enable_chunked_prefill=True; got False",
            ),
        ):
            if is_refused:
                raise ConfigError(message)
