"""Implement ``mie eval``: perplexity on a text, and the effect of rounded numbers on it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mie.base.files import without_bom
from mie.cli.parser import Commands, declared
from mie.config.arguments import add_settings, given
from mie.config.engine_args import EngineArgs
from mie.config.settings import settings_of
from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.lab.quality import Quality

_SETTINGS = (
    *("backend", "dtype", "quantization", "head_dtype", "weight_dtype", "kv_cache_dtype"),
    *("activations", "num_threads"),
)
"""The settings that can change predictions, or how long they take."""


def add_parser(commands: Commands) -> None:
    """Add ``mie eval`` to the command line."""
    omit = [name for name, *_ in settings_of(EngineArgs) if name not in _SETTINGS]
    declared(commands, "eval", run, settings=partial(add_settings, cls=EngineArgs, omit=omit))


def run(args: argparse.Namespace) -> int:
    """Print the measurements."""
    from mie.lab.quality import Predictor, quality, windows_of

    settings = given(args, EngineArgs)
    model = EngineArgs(**settings)
    rounding = {"quantization", "head_dtype", "activations", "kv_cache_dtype"}
    windows = windows_of(model, _text(args.text), args.window, args.num_tokens)
    reference = None
    if args.reference is not None or settings.keys() & rounding:
        others = {name: value for name, value in settings.items() if name not in rounding}
        plain = EngineArgs(**others | ({"model": args.reference} if args.reference else {}))
        reference = Predictor(plain, args.window)
    result = quality(windows, Predictor(model, args.window), reference)
    if args.json:
        print(json.dumps(asdict(result)))
    else:
        print("\n".join(f"{key:<12} {value}" for key, value in _facts(result)))
    return 0


def _text(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return without_bom(data).decode()
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not a text in UTF-8: {error}") from error


def _facts(result: Quality) -> Iterator[tuple[str, str]]:
    yield "tokens", f"{result.num_tokens:,}"
    reference = result.reference_perplexity
    change = f" (reference {reference:.4f})" if reference else ""
    yield "perplexity", f"{result.perplexity:.4f}{change}"
    if result.mean_kl is not None and result.same_top is not None:
        yield (
            "divergence",
            (f"mean {result.mean_kl:.5f}, 99 % below {result.p99_kl:.5f}, max {result.max_kl:.5f}"),
        )
        yield "same top", f"{result.same_top:.2%}"
