"""Implement ``mie inspect``: the contents of a model directory, and whether mie can run it.

It reads only headers, so it is quick for models of any size, also on the hub. ``--check`` also
reads the data.
"""

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mie.base.files import read_json_object
from mie.checkpoint.config import load_model_config
from mie.checkpoint.gguf.config import hf_config
from mie.checkpoint.gguf.files import no_config
from mie.checkpoint.gguf.header import read_gguf
from mie.checkpoint.hub import HubName, find_cached
from mie.checkpoint.hub_headers import without_data
from mie.checkpoint.locate import locate_model
from mie.checkpoint.size_limits import MAX_JSON_BYTES
from mie.checkpoint.tensors import kv_bytes_per_token, num_parameters
from mie.cli.families import families_table
from mie.config.arguments import format_size
from mie.errors import ConfigError, ModelError, UnsupportedModelError, WeightsError, shown_text
from mie.model.config import ModelConfig
from mie.model.layers.config import Experts


@dataclass(kw_only=True)
class ModelReport:
    """The facts that ``mie inspect`` shows. Unknown facts are None."""

    model: str
    directory: str
    architecture: str
    supported: bool = True
    problem: str | None = None
    config: ModelConfig | None = None
    num_parameters: int | None = None
    weights_bytes: int | None = None  # size in the files
    weights_bytes_float32: int | None = None  # size once loaded as float32
    weights_bytes_loaded: int | None = None  # with the forms of quantised matrices
    weights_dtypes: dict[str, int] | None = None  # number of tensors by dtype
    forms: dict[str, str] | None = None  # forms of quantised matrices by name
    kv_bytes_per_token_float32: int | None = None
    kv_bytes_per_token_float16: int | None = None
    kv_cache: dict[str, int] | None = None  # its size, and the tokens that fit, by element
    non_finite: dict[str, int] | None = None  # --check: elements by tensor


def run(args: argparse.Namespace) -> int:
    """Print the report, and return 0 if mie can run the model, else 1."""
    if args.families == (args.model is not None):
        raise ConfigError("mie inspect takes either a MODEL or --families")
    if args.families:
        print(families_table())
        return 0
    report = inspect_model(
        args.model, kv_cache_memory_bytes=args.kv_cache_memory_bytes, check=args.check
    )
    return show(report, as_json=args.json)


def show(report: ModelReport, *, as_json: bool = False) -> int:
    """Print a report, and return 0 if mie can run the model, else 1."""
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print_facts(_facts(report))
    for name, count in (report.non_finite or {}).items():
        print(f"warning: {name} has {count} NaN or infinite values", file=sys.stderr)
    return 1 if report.problem or report.non_finite else 0


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print a line for each key and its text."""
    print("\n".join(f"{key:<15} {value}" for key, value in facts))


def inspect_model(
    model: str, *, kv_cache_memory_bytes: int | None = None, check: bool = False
) -> ModelReport:
    """Return the report on ``model``, with the number of tokens that fit a KV cache of this size.

    Of a model on the hub, only the headers of the weights are fetched. With ``check`` the weights
    are read to find NaN and infinite values.

    Raises:
        ConfigError: ``check`` is set, and the weights are not on this machine.
        ModelError: there is no such model, or its ``config.json`` is missing or not JSON.
    """
    name = None if os.path.exists(model) else HubName.parse(model)
    if name is None or find_cached(name):
        directory = locate_model(model)
        return _report(model, str(directory), directory, kv_cache_memory_bytes, check=check)
    if check:
        raise ConfigError(
            f"--check reads all weights, and {model} is not on this machine (mie pull {model})"
        )
    with without_data(name) as directory:
        return _report(model, "not on this machine", directory, kv_cache_memory_bytes)


def _report(
    model: str, where: str, directory: Path, kv_cache_memory_bytes: int | None, check: bool = False
) -> ModelReport:
    architecture = _architecture_name(directory)
    report = ModelReport(model=model, directory=where, architecture=architecture)
    try:
        report.config = config = load_model_config(directory)
    except ModelError as error:
        report.supported = not isinstance(error, UnsupportedModelError)
        report.problem = str(error)
        return report
    report.architecture = config.architecture
    report.num_parameters = num_parameters(config)
    report.weights_bytes_float32 = 4 * report.num_parameters
    wide, narrow = kv_bytes_per_token(config, 4), kv_bytes_per_token(config, 2)
    report.kv_bytes_per_token_float32, report.kv_bytes_per_token_float16 = wide, narrow
    if kv_cache_memory_bytes is not None:
        report.kv_cache = {
            "memory_bytes": kv_cache_memory_bytes,
            "tokens_float32": kv_cache_memory_bytes // wide,
            "tokens_float16": kv_cache_memory_bytes // narrow,
        }
    try:
        _inspect_weights(report, directory, config, check=check)
    except WeightsError as error:
        report.problem = str(error)
    return report


def _inspect_weights(
    report: ModelReport, directory: Path, config: ModelConfig, *, check: bool
) -> None:
    # `mie doctor` must start without NumPy, and this module imports it.
    from mie.checkpoint.weights import (
        Checkpoint,
        check_tied_head,
        expected_tensors,
        non_finite_tensors,
    )

    shapes = expected_tensors(config)
    with Checkpoint.open(directory, shapes, config.quantisation) as checkpoint:
        if check:
            check_tied_head(checkpoint)
            report.non_finite = non_finite_tensors(checkpoint)
        report.weights_bytes = checkpoint.nbytes
        report.weights_dtypes = dict(Counter(checkpoint.dtypes[name] for name in checkpoint))
        report.forms = {name: str(form) for name, form in checkpoint.forms.items()}
        report.weights_bytes_loaded = sum(
            checkpoint.forms[name].num_bytes(*shape)
            if name in checkpoint.forms
            else 4 * math.prod(shape)
            for name, shape in shapes.items()
        )


def _architecture_name(directory: Path) -> str:
    """Return the name of the architecture in the file, even if the rest is unusable."""
    path = directory / "config.json"
    if directory.is_file():
        config = hf_config(read_gguf(directory))
    elif not os.path.lexists(path):
        raise no_config(directory)
    else:
        config = read_json_object(path, MAX_JSON_BYTES, ModelError)
    names = config.get("architectures") or [config.get("model_type")]
    name = names[0] if isinstance(names, list) else None
    if not isinstance(name, str) or not name:
        return "unknown"
    return shown_text(name)


def _facts(report: ModelReport) -> Iterator[tuple[str, str]]:
    """Yield the lines of the report: a key and a text."""
    yield "model", report.model
    yield "architecture", report.architecture
    yield "supported", "yes" if report.supported else "no"
    config = report.config
    if config is not None:
        heads = f"{config.num_heads} query, {config.num_kv_heads} key/value"
        if config.left_out:
            yield "left out", ", ".join(config.left_out)
        yield "layers", _layers(config)
        yield "heads", f"{heads}, {config.head_dim} wide"
        yield "hidden size", f"{config.hidden_size:,}, intermediate {config.intermediate_size:,}"
        if config.experts is not None:
            yield "experts", _experts(config.experts)
        yield "vocabulary", f"{config.vocab_size:,}{', tied' * config.tie_word_embeddings}"
        yield "context", f"{config.context_length:,} tokens, {_rope(config)}"
        yield "parameters", f"{report.num_parameters or 0:,}"
        if report.weights_bytes is not None and report.weights_dtypes is not None:
            size, dtypes = format_size(report.weights_bytes), ", ".join(report.weights_dtypes)
            yield "weights", f"{size} in the files ({dtypes})"
        yield from _forms(report.forms or {})
        loaded = format_size(report.weights_bytes_loaded or report.weights_bytes_float32 or 0)
        others = "with all others in float32" if report.forms else "as float32"
        yield "weights loaded", f"{loaded} {others}"
        wide, narrow = (format_size(kv_bytes_per_token(config, width)) for width in (4, 2))
        yield "KV per token", f"{wide} in float32, {narrow} in 16 bits"
        if config.recurrent is not None:
            number = config.recurrent.shape.num_elements * config.layers_recurrent.count(True)
            size = format_size(4 * number)
            yield "state", f"{size} in float32 for each sequence and each snapshot"
    if report.kv_cache is not None:
        memory, wide_tokens, narrow_tokens = report.kv_cache.values()
        fit = f"{format_size(memory)} hold {wide_tokens:,} tokens in float32"
        yield "KV cache", f"{fit}, {narrow_tokens:,} in 16 bits"
    if report.non_finite is not None:
        found = f"NaN or infinite values in {len(report.non_finite)} tensors"
        yield "check", found if report.non_finite else "all values are finite"
    if report.problem is not None:
        yield "problem", report.problem


def _rope(config: ModelConfig) -> str:
    kinds = {rope.rope_type for rope in config.layer_ropes if rope is not None}
    num_without = config.layer_ropes.count(None) - config.layers_recurrent.count(True)
    without = f", {num_without} layers without" if num_without else ""
    return f"RoPE {' and '.join(sorted(kinds)) or 'none'}{without}"


def _forms(forms: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the forms of quantised matrices, each with the kinds of matrices that have it."""
    for form in dict.fromkeys(forms.values()):
        kinds = Counter(name.split(".")[-2] for name, own in forms.items() if own == form)
        yield "quantised", f"{form}: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}"


def _experts(experts: Experts) -> str:
    sizes = f"{experts.number}, {experts.num_chosen} for each token, intermediate {experts.size:,}"
    num_dense = experts.layers.count(False)
    without = f", {num_dense} layers without" if num_dense else ""
    return f"{sizes}{', beside a shared one' * experts.are_beside_mlp}{without}"


def _layers(config: ModelConfig) -> str:
    windows = Counter(
        window
        for window, is_recurrent in zip(config.layer_windows, config.layers_recurrent, strict=True)
        if not is_recurrent
    )
    kinds = [
        f"{count} with {f'a window of {window:,} tokens' if window else 'full attention'}"
        for window, count in windows.items()
    ]
    if config.recurrent is not None:
        kinds.append(f"{config.layers_recurrent.count(True)} with a state")
    return f"{config.num_layers}: {', '.join(kinds)}"
