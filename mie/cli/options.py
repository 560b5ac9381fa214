"""Flags that commands share, spelled as vLLM spells them: of the engine, and of sampling."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from mie.cli.sizes import size_argument
from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.llm import LLM
    from mie.sched.params import SamplingParams

DEFAULT_MODEL = "bundled"

# The names that become keyword arguments of LLM and of SamplingParams.
_ENGINE_NAMES = (
    "backend",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "kv_cache_memory_bytes",
    "enable_prefix_caching",
    "partial_block_sharing",
    "max_cached_blocks",
    "scheduling_policy",
    "batching",
    "max_prefill_chunk",
    "enable_chunked_prefill",
    "watermark",
    "preemption_mode",
    "swap_space",
    "kv_cache_dtype",
    "async_scheduling",
    "num_threads",
    "batch_invariant",
    "linear_plan",
    "weight_dtype",
    "enforce_eager",
    "gpu_memory_utilization",
)
_SAMPLING_NAMES = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "skip_special_tokens",
    "n",
    "logprobs",
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The model, and how large and how wide its engine is."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="'bundled' (the default), a directory in Hugging Face format, or a hub id",
    )
    group = parser.add_argument_group("engine", "What is not given is chosen from the model.")
    _add(
        group,
        "--backend",
        metavar="NAME",
        help="what computes: numpy, numpy-plain, cupy or cupy-emulated",
    )
    _add(group, "--dtype", metavar="TYPE", help="auto, float32, float64, float16, bfloat16")
    _add(group, "--kv-cache-dtype", metavar="TYPE", help="auto (as --dtype), int8 or fp8")
    _add(
        group,
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="launch a step while the one before it runs (the default on a GPU)",
    )
    _add(group, "--num-threads", type=int, help="threads that compute (one for each CPU)")
    _add(
        group,
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        help="the same bits for a request whatever else runs (where that costs next to nothing)",
    )
    _add(
        group,
        "--linear-plan",
        metavar="PLAN",
        help="how the CPU keeps matrices: plain, tiled, or auto, what a probe finds faster",
    )
    _add(
        group,
        "--weight-dtype",
        metavar="DTYPE",
        help="bfloat16 or float16 keeps a checkpoint's matrices so on the CPU (auto widens them)",
    )
    _add(group, "--max-model-len", type=int, help="tokens of a prompt and its answer together")
    _add(group, "--max-num-seqs", type=int, help="sequences that run at once")
    _add(group, "--max-num-batched-tokens", type=int, help="tokens that a step computes at most")
    _add(group, "--block-size", type=int, help="tokens in a block of the KV cache")
    _add(
        group,
        "--num-blocks",
        "--num-gpu-blocks-override",
        dest="num_blocks",
        type=int,
        help="blocks in the KV cache",
    )
    _add(
        group,
        "--kv-cache-memory-bytes",
        type=size_argument,
        metavar="SIZE",
        help="size of the KV cache, such as 512MiB; instead of --num-blocks",
    )
    _add(
        group,
        "--enforce-eager",
        action="store_true",
        help="on a GPU, launch the kernels of a step one by one, not as a CUDA graph",
    )
    _add(
        group,
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="of a GPU's memory that may be in use in the end (0.9)",
    )
    _add(
        group,
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="share the blocks of equal prompt beginnings (the default)",
    )
    _add(
        group,
        "--partial-block-sharing",
        action=argparse.BooleanOptionalAction,
        help="reuse the equal beginning of a block too, by a copy (the default)",
    )
    _add(group, "--max-cached-blocks", type=int, help="blocks kept at most when nobody holds them")
    _add(group, "--scheduling-policy", metavar="NAME", help="fcfs (the default), priority or sjf")
    _add(group, "--batching", metavar="NAME", help="continuous (the default) or static")
    _add(group, "--max-prefill-chunk", type=int, help="tokens of one prompt in a step at most")
    _add(
        group,
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        help="compute a long prompt in several steps (the default)",
    )
    _add(group, "--watermark", type=float, metavar="SHARE", help="blocks left free (0.01)")
    _add(group, "--preemption-mode", metavar="NAME", help="recompute (the default) or swap")
    _add(
        group,
        "--swap-space",
        type=size_argument,
        metavar="SIZE",
        help="with swap: the host's room for blocks, such as 1GiB",
    )


def add_sampling_options(
    parser: argparse.ArgumentParser, *, max_tokens: int | None, choices: bool = True
) -> None:
    """How tokens are chosen and when an answer ends; ``choices``: with ``--n`` and the like."""
    group = parser.add_argument_group("sampling")
    limit = "until the context is full" if max_tokens is None else f"default {max_tokens}"
    _add(group, "--max-tokens", type=int, default=max_tokens, help=f"most new tokens ({limit})")
    _add(group, "--min-tokens", type=int, help="do not end before so many")
    _add(group, "--temperature", type=float, metavar="T", help="0 takes the most likely token (1)")
    _add(group, "--top-p", type=float, metavar="P", help="of the most likely, up to this mass (1)")
    _add(group, "--top-k", type=int, metavar="K", help="of the K most likely (0: of all)")
    _add(group, "--min-p", type=float, metavar="P", help="at least P times the most likely (0)")
    _add(group, "--seed", type=int, help="a prompt and a seed give one text, whatever else runs")
    _add(group, "--stop", action="append", metavar="TEXT", help="end before TEXT; repeatable")
    _add(
        group,
        "--stop-token-ids",
        action="append",
        type=int,
        metavar="ID",
        help="end after this token; repeatable",
    )
    _add(group, "--include-stop-str-in-output", action="store_true", help="keep the stop string")
    _add(group, "--ignore-eos", action="store_true", help="go on after the end-of-text token")
    _add(group, "--repetition-penalty", type=float, metavar="X", help="above 1: repeat less (1)")
    _add(group, "--presence-penalty", type=float, metavar="X", help="-2 … 2 (0)")
    _add(group, "--frequency-penalty", type=float, metavar="X", help="-2 … 2 (0)")
    _add(
        group,
        "--skip-special-tokens",
        action=argparse.BooleanOptionalAction,
        help="leave special tokens out of the text (the default)",
    )
    if choices:
        _add(group, "--n", type=int, help="answers to each prompt (1)")
        _add(group, "--logprobs", type=int, metavar="K", help="with --json: the K most likely")


def load_llm(args: argparse.Namespace, trace: TextIO | None = None, **more: Any) -> LLM:
    """The model that ``args`` name, with the engine that they describe and ``more`` settings."""
    from mie.llm import LLM

    return LLM(args.model, trace=trace, **engine_options(args), **more)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's flags that were given, by name."""
    return _given(args, _ENGINE_NAMES)


def add_trace_option(parser: argparse.ArgumentParser) -> None:
    """``--trace FILE``."""
    parser.add_argument(
        "--trace", metavar="FILE", help="write the event log as JSON lines; mie trace FILE shows it"
    )


@contextmanager
def llm_with_trace(args: argparse.Namespace, **more: Any) -> Iterator[LLM]:
    """`load_llm`, with the file that ``--trace`` names open as long as it is needed.

    Raises:
        ConfigError: the file cannot be written.
    """
    if args.trace is None:
        yield load_llm(args, **more)
        return
    file = open_trace(args.trace)
    with closing_quietly(file), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # `trace_failed` says it
        llm = load_llm(args, file, **more)
        try:
            yield llm
        finally:
            with suppress(OSError):  # so little is left that its loss only cuts the last line
                llm.engine.log.close()


def open_trace(path: str) -> TextIO:
    """The file for an event log, or `ConfigError`."""
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --trace {path}: {error.strerror}") from error


@contextmanager
def closing_quietly(file: TextIO) -> Iterator[None]:
    """Close a file whose failed writes were reported already."""
    try:
        yield
    finally:
        with suppress(OSError):
            file.close()


def trace_failed(args: argparse.Namespace, llm: LLM) -> bool:
    """Whether the trace ended early; standard error says so."""
    error = llm.engine.log_error
    if error is not None:
        message = f"--trace {args.trace} is incomplete: {getattr(error, 'strerror', None) or error}"
        print(f"mie: error: {message}", file=sys.stderr)
    return error is not None


def sampling_params(
    args: argparse.Namespace, overrides: Mapping[str, Any] | None = None
) -> SamplingParams:
    """The sampling flags in ``args``, with ``overrides`` by name.

    Raises:
        ConfigError: a value is out of range, or an override is no parameter.
    """
    from mie.sched.params import SamplingParams

    unlimited = {"max_tokens": None} if args.max_tokens is None else {}
    return SamplingParams(**{**unlimited, **_given(args, _SAMPLING_NAMES), **(overrides or {})})


def _add(group: argparse._ArgumentGroup, *names: str, **settings: Any) -> None:
    """A flag that is None unless given: defaults are LLM's and SamplingParams' own."""
    if settings.get("type") is int:
        settings.setdefault("metavar", "N")
    group.add_argument(*names, **{"default": None, **settings})


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}
