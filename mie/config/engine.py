"""Declare the settings of an engine, and check the values of settings."""

import difflib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from mie.config.quotas import quotas_of
from mie.config.settings import BACKENDS, Setting, setting, settings_of
from mie.errors import ConfigError
from mie.reprs import changed_repr

T = TypeVar("T")


def refuse_unknown(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ConfigError` for the first of ``names`` that is not ``known``, with a suggestion."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise ConfigError(f"{what} has no parameter {name!r}; {hint}")


def keyword_checked(cls: type[T]) -> type[T]:
    """Make a dataclass raise `ConfigError` for an unknown keyword. This is a class decorator."""
    original = cls.__init__
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # cls is a dataclass

    @functools.wraps(original)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, known)
        original(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[assignment]  # same keywords, checked first
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
    # An integer may be too large for a float, but comparing the two is still exact.
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


def check_settings(values: object) -> None:
    """Raise `ConfigError` unless every setting of a dataclass has an allowed value."""
    for name, _, declared in settings_of(type(values)):
        check_setting(name, getattr(values, name), declared)


def check_setting(name: str, value: Any, declared: Setting) -> None:
    """Raise `ConfigError` unless the value is allowed for the setting ``name``."""
    low, high = declared.low, declared.high
    if value is None and declared.is_optional:
        return
    if declared.kind in ("integer", "size"):
        check_integer(name, value, int(low), None if high is None else int(high))
    elif declared.kind == "number":
        high = math.inf if high is None else high
        check_real(name, value, low, high, above_low=declared.above_low)
    elif declared.kind == "choice":
        check_choice(name, value, declared.choices)
    elif declared.kind == "switch":
        check_switch(name, value)


POLICIES = ("fcfs", "priority", "sjf", "fair")
_OF_A_POLICY = (("sjf_ageing", "sjf"), ("fair_turn", "fair"), ("client_quotas", "fair"))
_GPU = ("cupy", "cupy-emulated")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Declarations of an engine's settings, which `EngineConfig` checks."""

    max_model_len: int | None = setting(
        None,
        "integer",
        "maximum number of tokens of a prompt and its completion together, up to the model's "
        "context length",
        "scheduling",
        low=1,
        default_text="the model's context length",
    )
    max_num_seqs: int = setting(
        64, "integer", "maximum number of sequences that run at once", "scheduling", low=1
    )
    max_num_batched_tokens: int = setting(
        2048, "integer", "maximum number of tokens computed in one step", "scheduling", low=1
    )
    max_prefill_chunk: int | None = setting(
        None,
        "integer",
        "maximum number of tokens of one prompt computed in one step, with chunked prefill",
        "scheduling",
        low=1,
        default_text="no limit",
    )
    enable_chunked_prefill: bool = setting(
        True,
        "switch",
        "split long prompts over several steps; without it a step must hold a whole context",
        "scheduling",
    )
    block_size: int = setting(
        16, "integer", "number of tokens in a block of the KV cache", "KV cache", low=1
    )
    num_blocks: int | None = setting(
        None,
        "integer",
        "number of blocks in the KV cache",
        "KV cache",
        low=1,
        default_text="as many as max_num_seqs full contexts need, within the memory budget",
    )
    kv_cache_memory_bytes: int | None = setting(
        None,
        "size",
        "size of the KV cache in bytes; an alternative to num_blocks",
        "KV cache",
        low=1,
        default_text="see num_blocks",
    )
    enable_prefix_caching: bool = setting(
        True, "switch", "reuse the KV blocks of equal prompt prefixes", "KV cache"
    )
    partial_block_sharing: bool = setting(
        True, "switch", "also reuse the beginning of a block, by copying it", "KV cache"
    )
    max_cached_blocks: int | None = setting(
        None,
        "integer",
        "maximum number of unreferenced blocks kept in the prefix cache",
        "KV cache",
        default_text="no limit",
    )
    scheduling_policy: str = setting(
        "fcfs",
        "choice",
        "order in which requests are served: first come first served, by their priority, "
        "shortest job first, or an equal share of tokens for each client",
        "scheduling",
        choices=POLICIES,
    )
    sjf_ageing: int | None = setting(
        None,
        "integer",
        "number of tokens by which a waiting job counts as shorter after each step under sjf, so "
        "that none starves",
        "scheduling",
        low=1,
        default_text="1",
    )
    fair_turn: int | None = setting(
        None,
        "integer",
        "number of steps before a sequence may be preempted for another client under fair",
        "scheduling",
        low=1,
        default_text="16",
    )
    client_quotas: Mapping[str, Any] | None = setting(
        None,
        "mapping",
        'weights and seats of clients under fair: {"jobs": {"weight": 0.5, "max_num_seqs": 4}}',
        "scheduling",
    )
    batching: str = setting(
        "continuous",
        "choice",
        "when requests are admitted: at any step, or (for comparison) only when the whole batch "
        "has finished",
        "scheduling",
        choices=("continuous", "static"),
    )
    watermark: float = setting(
        0.01,
        "number",
        "fraction of the blocks, rounded up, that admission keeps free while other requests run",
        "scheduling",
        high=1,
    )
    admit_after_preemption: bool = setting(
        False,
        "switch",
        "admit requests even in a step that preempts, for comparison",
        "scheduling",
    )
    preemption_mode: str = setting(
        "recompute",
        "choice",
        "what happens to the KV blocks of a preempted sequence: drop and recompute them, or swap "
        "them to host memory",
        "scheduling",
        choices=("recompute", "swap"),
    )
    swap_space: int | None = setting(
        None,
        "size",
        "size of the swap pool in host memory, in bytes where vLLM counts GiB; for swap only",
        "scheduling",
        low=1,
        default_text="4 GiB, at most a quarter of the free memory",
        is_ignorable=True,
    )
    event_log_steps: int = setting(
        2000,
        "integer",
        "number of steps that the event log keeps in memory; 0 keeps none",
        "engine",
    )
    seed: int = setting(
        0,
        "integer",
        "seed for the sampling of requests that have none of their own",
        "engine",
        low=-(2**63),
        high=2**64 - 1,
    )
    max_logprobs: int = setting(
        -1,
        "integer",
        "maximum number of log-probabilities per position that a request may have; -1 sets no "
        "limit (vLLM's default is 20)",
        "engine",
        low=-1,
        is_simulated=False,
    )
    max_forced_run: int = setting(
        32,
        "integer",
        "maximum number of determined tokens of a structured output that one step takes at once, "
        "in addition to a sampled one; 0 samples them one by one",
        "scheduling",
        high=64,
        is_simulated=False,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "choice",
        "data type of the KV cache; auto is dtype, int8 and fp8 take one "
        "byte per element and a scale per token and head",
        "KV cache",
        choices=("auto", "int8", "fp8"),
        backends=BACKENDS,
    )
    async_scheduling: bool | None = setting(
        None,
        "switch",
        "plan and launch a decode step while the previous one runs",
        "scheduling",
        default_text="on for a GPU",
        is_simulated=False,
    )
    num_threads: int | None = setting(
        None,
        "integer",
        "number of threads that compute",
        "computation",
        low=1,
        default_text="one for each CPU that the process may use",
        backends=("jit", "numpy"),
    )
    batch_invariant: bool = setting(
        False,
        "switch",
        "give a request the same bits in any batch, with any chunks, prefix hits, preemptions or "
        "number of threads, at the cost of slower products; jit always does, at no cost; on a GPU "
        "not if generated tokens are computed again",
        "computation",
        backends=("jit", "numpy", *_GPU),
    )
    linear_plan: str = setting(
        "auto",
        "choice",
        "memory layout of weight matrices on backend numpy; auto is tiled if the BLAS has "
        "small-matrix kernels for this CPU (AVX-512), with batch_invariant or with 16-bit weights, "
        "else plain",
        "computation",
        choices=("auto", "plain", "tiled"),
        backends=("numpy",),
    )
    weight_dtype: str = setting(
        "auto",
        "choice",
        "data type in which a CPU stores weight matrices; bfloat16 and float16 keep a checkpoint's "
        "16-bit matrices, float32 widens them at load time; auto keeps them on jit, not on numpy",
        "computation",
        choices=("auto", "float32", "bfloat16", "float16"),
        backends=("jit", "numpy"),
    )
    enforce_eager: bool = setting(
        False,
        "switch",
        "launch every kernel individually, without recorded steps or CUDA graphs",
        "computation",
        backends=("jit", *_GPU),
        is_ignorable=True,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "number",
        "fraction of GPU memory to use, counting other processes",
        "KV cache",
        high=1,
        above_low=True,
        backends=("cupy",),
        is_ignorable=True,
    )


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineSettings):
    """The size of an engine and the limits of a step. None means that the model determines it.

    The KV cache has ``num_blocks`` blocks of ``block_size`` tokens, or as many blocks as fit
    ``kv_cache_memory_bytes``. A step computes at most ``max_num_batched_tokens`` tokens, including
    decodes, for at most ``max_num_seqs`` sequences. docs/settings.md explains every field.
    """

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        check_settings(self)
        quotas_of(self.client_quotas)
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        """Refuse settings that have no effect because of another setting."""
        for is_refused, message in (
            (
                self.num_blocks is not None and self.kv_cache_memory_bytes is not None,
                "num_blocks and kv_cache_memory_bytes both size the KV cache; give one",
            ),
            (
                self.weight_dtype in ("bfloat16", "float16") and self.linear_plan == "plain",
                f"weight_dtype={self.weight_dtype!r} needs linear_plan='tiled' or 'auto'; got "
                "'plain'",
            ),
            (
                self.swap_space is not None and self.preemption_mode != "swap",
                "swap_space needs preemption_mode='swap'; got preemption_mode='recompute'",
            ),
            *(
                (
                    getattr(self, name) is not None and self.scheduling_policy != policy,
                    f"{name} needs scheduling_policy={policy!r}; got {self.scheduling_policy!r}",
                )
                for name, policy in _OF_A_POLICY
            ),
            (
                self.admit_after_preemption and self.batching == "static",
                "admit_after_preemption needs batching='continuous'; got 'static'",
            ),
            (
                self.max_cached_blocks is not None and not self.enable_prefix_caching,
                "max_cached_blocks needs enable_prefix_caching=True; got False",
            ),
            (
                self.max_prefill_chunk is not None and not self.enable_chunked_prefill,
                "max_prefill_chunk needs enable_chunked_prefill=True; got False",
            ),
        ):
            if is_refused:
                raise ConfigError(message)
