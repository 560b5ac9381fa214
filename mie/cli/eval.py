"""Implement ``mie eval``: perplexity on a text, and the effect of rounded weights on it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mie.cli.options import DEFAULT_MODEL
from mie.config.arguments import add_settings, given, option
from mie.config.engine_args import EngineArgs
from mie.config.settings import settings_of
from mie.errors import ConfigError

if TYPE_CHECKING:
    from mie.diff.quality import Quality

_NUMBERS = (
    ("window", 512, "tokens of a window; each is predicted from those before it in the window"),
    ("num_tokens", 4096, "maximum number of tokens of the text that are used"),
)
_SETTINGS = (
    *("backend", "dtype", "quantization", "head_dtype", "weight_dtype", "kv_cache_dtype"),
    "num_threads",
)
"""The settings that can change predictions, or how long they take."""

_EPILOG = """\
  perplexity   exp of the mean negative log-probability of a token: lower is better
  divergence   of the reference's next-token probabilities from the model's, in nats: 0 is equal
  same top     predictions whose most likely token is the reference's

The reference is the model without quantization and head_dtype if one of them is given, or the
model --reference. A model without a reference gets a perplexity only.

examples:
  mie eval text.txt --quantization int4             the bundled model, rounded and as it is
  mie eval text.txt --model ./4bit --reference ./16bit
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add ``mie eval`` to the command line. Its parser sets ``run``."""
    parser = subparsers.add_parser(
        "eval",
        help="measure perplexity on a text, and the effect of quantised weights",
        description="Measure how well a model predicts a text, and how much quantisation changes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("text", metavar="FILE", help="text file in UTF-8; - is standard input")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="'bundled' (default), a directory in Hugging Face format, or a hub id",
    )
    parser.add_argument("--reference", metavar="MODEL", help="model to compare with")
    for name, default, text in _NUMBERS:
        parser.add_argument(
            option(name),
            type=int,
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    add_settings(
        parser, EngineArgs, [name for name, *_ in settings_of(EngineArgs) if name not in _SETTINGS]
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the measurements.

    Raises:
        ConfigError: an argument is out of range, or the text is too short.
        ModelError: a model cannot be used.
    """
    from mie.diff.quality import Predictor, quality, windows_of

    settings = given(args, EngineArgs)
    model = EngineArgs(**settings)
    rounding = {"quantization", "head_dtype"}
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
        return data.decode()
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
