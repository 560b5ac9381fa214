"""Implement ``mie inspect``: the contents of a model directory, and whether mie can run it.

It reads only headers, so it is quick for models of any size. ``--check`` also reads the data.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from mie.checkpoint.config import ModelConfig
from mie.checkpoint.locate import locate_model
from mie.checkpoint.size_limits import MAX_JSON_BYTES
from mie.checkpoint.tensors import num_parameters
from mie.config.arguments import format_size, size_argument
from mie.errors import ModelError, UnsupportedModelError, WeightsError, shown_text
from mie.system.files import read_json_object

_EPILOG = """\
exit codes:
  0  the model can be run
  1  it cannot: the architecture or a feature is not supported, the configuration or the weights
     are broken, or --check found NaN or infinite values
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add ``mie inspect`` to the command line. Its parser sets ``run``."""
    parser = subparsers.add_parser(
        "inspect",
        help="show a model's architecture and memory use",
        description=(
            "Show a model's architecture, whether it is supported or why not, its sizes, and the "
            "memory of its weights and its KV cache. Only headers are read."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="'bundled', a directory, or a hub id")
    parser.add_argument(
        "--kv-cache-memory-bytes",
        type=size_argument,
        metavar="SIZE",
        help="show how many tokens fit a KV cache of this size, such as 512MiB or 2GB",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="also read the weights, and list tensors with NaN or infinite values",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.set_defaults(run=run)
    return parser


@dataclass(frozen=True, kw_only=True)
class KVCacheFit:
    """Number of tokens that fit a KV cache of ``memory_bytes``, by the width of its elements."""

    memory_bytes: int
    tokens_float32: int
    tokens_float16: int


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """The facts that ``mie inspect`` shows. Unknown facts are None."""

    model: str
    directory: str
    architecture: str
    supported: bool
    problem: str | None = None
    config: ModelConfig | None = None
    num_parameters: int | None = None
    weights_bytes: int | None = None  # in the files
    weights_bytes_float32: int | None = None  # loaded
    weights_dtypes: dict[str, int] | None = None  # tensors by dtype
    kv_bytes_per_token_float32: int | None = None
    kv_bytes_per_token_float16: int | None = None
    kv_cache: KVCacheFit | None = None
    non_finite: dict[str, int] | None = None  # --check: elements by tensor

    @property
    def can_run(self) -> bool:
        """Whether the model is supported, its weights fit, and no check failed."""
        return self.supported and self.problem is None and not self.non_finite


def run(args: argparse.Namespace) -> int:
    """Print the report, and return 0 if mie can run the model, else 1.

    Raises:
        ModelError: there is no such model directory, or it has no config.json.
    """
    report = inspect_model(
        args.model, kv_cache_memory_bytes=args.kv_cache_memory_bytes, check=args.check
    )
    print(json.dumps(asdict(report), indent=2) if args.json else render(report))
    for name, count in (report.non_finite or {}).items():
        print(f"warning: {name} has {count} NaN or infinite values", file=sys.stderr)
    return 0 if report.can_run else 1


def inspect_model(
    model: str, *, kv_cache_memory_bytes: int | None = None, check: bool = False
) -> ModelReport:
    """Return the report on ``model``.

    Args:
        model: ``"bundled"``, a directory, or a hub id.
        kv_cache_memory_bytes: size of a KV cache for which the number of tokens is computed.
        check: whether to read the weights and look for NaN and infinite values.

    Raises:
        ModelError: there is no such directory, or its ``config.json`` is missing or not JSON.
    """
    directory = locate_model(model)
    architecture = _architecture_name(directory)
    try:
        config = ModelConfig.load(directory)
    except ModelError as error:
        return ModelReport(
            model=model,
            directory=str(directory),
            architecture=architecture,
            supported=not isinstance(error, UnsupportedModelError),
            problem=str(error),
        )
    weights = _inspect_weights(directory, config, check=check)
    per_token = {width: config.kv_bytes_per_token(width) for width in (2, 4)}
    return ModelReport(
        model=model,
        directory=str(directory),
        architecture=config.architecture,
        supported=True,
        problem=weights.problem,
        config=config,
        num_parameters=num_parameters(config),
        weights_bytes=weights.num_bytes,
        weights_bytes_float32=4 * num_parameters(config),
        weights_dtypes=weights.dtypes,
        kv_bytes_per_token_float32=per_token[4],
        kv_bytes_per_token_float16=per_token[2],
        kv_cache=_kv_cache_fit(config, kv_cache_memory_bytes),
        non_finite=weights.non_finite,
    )


@dataclass(frozen=True, kw_only=True)
class _WeightsReport:
    problem: str | None = None
    num_bytes: int | None = None
    dtypes: dict[str, int] | None = None
    non_finite: dict[str, int] | None = None


def _inspect_weights(directory: Path, config: ModelConfig, *, check: bool) -> _WeightsReport:
    # `mie doctor` must start without NumPy, which this module imports.
    from mie.checkpoint.weights import (
        Checkpoint,
        check_tied_head,
        expected_tensors,
        non_finite_tensors,
    )

    try:
        with Checkpoint.open(directory, expected_tensors(config)) as checkpoint:
            if check:
                check_tied_head(checkpoint)
            return _WeightsReport(
                num_bytes=checkpoint.nbytes,
                dtypes=dict(Counter(checkpoint.dtypes[name] for name in checkpoint)),
                non_finite=non_finite_tensors(checkpoint) if check else None,
            )
    except WeightsError as error:
        return _WeightsReport(problem=str(error))


def _kv_cache_fit(config: ModelConfig, memory_bytes: int | None) -> KVCacheFit | None:
    if memory_bytes is None:
        return None
    return KVCacheFit(
        memory_bytes=memory_bytes,
        tokens_float32=memory_bytes // config.kv_bytes_per_token(4),
        tokens_float16=memory_bytes // config.kv_bytes_per_token(2),
    )


def _architecture_name(directory: Path) -> str:
    """Return the name of the architecture in the file, even if the rest is unusable."""
    path = directory / "config.json"
    if not os.path.lexists(path):
        raise ModelError(f"{directory} is not a model directory: it has no config.json")
    config = read_json_object(path, MAX_JSON_BYTES, ModelError)
    names = config.get("architectures") or [config.get("model_type")]
    name = names[0] if isinstance(names, list) else None
    if not isinstance(name, str) or not name:
        return "unknown"
    return shown_text(name)


def render(report: ModelReport) -> str:
    """Return the report as text, one fact per line."""
    lines = [("model", report.model), ("architecture", report.architecture)]
    lines.append(("supported", "yes" if report.supported else "no"))
    if report.config is not None:
        lines += _config_lines(report.config)
        lines += _memory_lines(report)
    if report.non_finite is not None:
        found = f"NaN or infinite values in {len(report.non_finite)} tensors"
        lines.append(("check", found if report.non_finite else "all values are finite"))
    if report.problem is not None:
        lines.append(("problem", report.problem))
    return "\n".join(f"{key:<15} {value}" for key, value in lines)


def _config_lines(config: ModelConfig) -> list[tuple[str, str]]:
    return [
        ("layers", _layers(config)),
        (
            "heads",
            f"{config.num_heads} query, {config.num_kv_heads} key/value, {config.head_dim} wide",
        ),
        ("hidden size", f"{config.hidden_size:,}, intermediate {config.intermediate_size:,}"),
        ("vocabulary", f"{config.vocab_size:,}{', tied' if config.tie_word_embeddings else ''}"),
        ("context", f"{config.context_length:,} tokens, RoPE {config.rope.rope_type}"),
    ]


def _layers(config: ModelConfig) -> str:
    kinds = [
        f"{count} with {f'a window of {window:,} tokens' if window else 'full attention'}"
        for window, count in Counter(config.layer_windows).items()
    ]
    return f"{config.num_layers}: {', '.join(kinds)}"


def _memory_lines(report: ModelReport) -> list[tuple[str, str]]:
    lines = [("parameters", f"{report.num_parameters or 0:,}")]
    if report.weights_bytes is not None and report.weights_dtypes is not None:
        dtypes = ", ".join(report.weights_dtypes)
        lines.append(("weights", f"{format_size(report.weights_bytes)} in the files ({dtypes})"))
    loaded = format_size(report.weights_bytes_float32 or 0)
    lines.append(("weights loaded", f"{loaded} as float32"))
    per_token = (report.kv_bytes_per_token_float32, report.kv_bytes_per_token_float16)
    wide, narrow = (format_size(size or 0) for size in per_token)
    lines.append(("KV per token", f"{wide} in float32, {narrow} in 16 bits"))
    if report.kv_cache is not None:
        fit = report.kv_cache
        lines.append(
            (
                "KV cache",
                f"{format_size(fit.memory_bytes)} hold {fit.tokens_float32:,} tokens in float32, "
                f"{fit.tokens_float16:,} in 16 bits",
            )
        )
    return lines
