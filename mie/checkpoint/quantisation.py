"""Read the quantised matrices of a checkpoint, and their forms, from its ``config.json``.

    compressed-tensors   pack-quantized, int-quantized, float-quantized: llm-compressor's files
    gptq                 versions 1 and 2, symmetric
    awq                  version "gemm"
    mxfp4                the experts of gpt-oss

Sources: `compressed_tensors.quantization.QuantizationArgs` and `utils.match`, AutoGPTQ's
``quantize_config``, and AutoAWQ's ``AwqConfig``.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.size_limits import MAX_PATTERNS, MAX_WIDTH
from mie.errors import ModelError, UnsupportedModelError, shown
from mie.model.layers.config import Quantisation, Scheme

MIN_GROUP = 16
"""Inputs that share a scale are a multiple of this number."""

_METHODS = ("compressed-tensors", "gptq", "awq", "mxfp4")
_PACKED, _INTEGERS, _FLOATS = "pack-quantized", "int-quantized", "float-quantized"
_REMEDY = "use the unquantised model; the setting quantization='int4' or 'int8' makes it small"
# Two repetitions take at most n**2 steps for a name of n characters. A third at the end is free.
_MAX_REPETITIONS, _MAX_PATTERN, _MAX_GROUPS, _MAX_OF_LIST = 2, 200, 8, 8
_OF_GROUP = re.compile(r"\)[*+{?]")


def scheme_of(quantisation: Quantisation, module: str) -> Scheme | None:
    """Return the scheme of a module by its name. None: it is not quantised.

    A target or an ignored name names a module, a class ("Linear"), or "re:" and a pattern that must
    match the beginning of a name.
    """
    if any(_matches(module, name) for name in quantisation.ignore):
        return None
    schemes = (
        scheme
        for targets, scheme in quantisation.groups
        if any(_matches(module, target) for target in targets)
    )
    return next(schemes, None)


def read_quantisation(config: JsonReader) -> Quantisation | None:
    """Return the quantisation that a configuration declares.

    Raises:
        UnsupportedModelError: its method or a feature is not supported. The message names it.
        ModelError: a value is bad.
    """
    of_mlx = config.values.get("quantization")
    if isinstance(of_mlx, Mapping) and {"bits", "group_size"} <= of_mlx.keys():
        raise _unsupported(config, "MLX's quantisation (quantization)", _METHODS)
    found = [key for key in ("quantization_config", "compression_config") if config.values.get(key)]
    if not found:
        return None
    reader = config.nested(found[0])
    method = reader.text("quant_method")
    if method not in _METHODS:
        raise _unsupported(reader, f"quantization method {shown(method)}", _METHODS)
    if method == "compressed-tensors":
        return _compressed_tensors(reader)
    if method == "mxfp4":
        scheme = Scheme(format="mxfp4", bits=4, group=32, symmetric=True)
    else:
        scheme = _gptq(reader) if method == "gptq" else _awq(reader)
    return Quantisation(method=method, groups=((("Linear",), scheme),))


def _compressed_tensors(reader: JsonReader) -> Quantisation:
    _refuse(reader, {"sparsity_config": "sparsity", "transform_config": "transforms of weights"})
    _refuse(reader, {"kv_cache_scheme": "scales of the KV cache"})
    ignore = _patterns(reader, "ignore")
    groups = reader.nested("config_groups")
    default = reader.text("format", default="")
    schemes = []
    if len(groups.values) > _MAX_GROUPS:
        raise reader.error("config_groups", f"must have at most {_MAX_GROUPS}", len(groups.values))
    for name in groups.values:
        group = groups.nested(name)
        format_ = group.text("format", default=default)
        if format_ not in (_PACKED, _INTEGERS, _FLOATS):
            supported = (_PACKED, _INTEGERS, _FLOATS)
            raise _unsupported(group, f"format {shown(format_)}", supported)
        schemes.append((_patterns(group, "targets"), _weights(group.nested("weights"), format_)))
    if not schemes:
        raise reader.error("config_groups", "must have a group", reader.values.get("config_groups"))
    return Quantisation(method="compressed-tensors", groups=tuple(schemes), ignore=ignore)


def _weights(reader: JsonReader, format_: str) -> Scheme:
    """Return the scheme of a group of compressed-tensors."""
    bits, kind = reader.integer("num_bits", maximum=64), reader.text("type", default="int")
    widths = (4, 8) if format_ == _PACKED else (8,)
    if bits not in widths or kind != ("float" if format_ == _FLOATS else "int"):
        known = [f"{'float' if format_ == _FLOATS else 'int'} of {width} bits" for width in widths]
        raise _unsupported(reader, f"{format_} with {kind} of {bits} bits", known)
    symmetric = reader.flag("symmetric", default=True)
    if format_ == _FLOATS and not symmetric:
        raise _unsupported(reader, f"{format_} with zero points", ())
    if reader.values.get("actorder") not in (None, False, "weight", "static"):
        raise _unsupported(reader, "actorder 'group'", ("'weight'", "'static'"))
    strategy = reader.text("strategy", default="group" if reader.values.get("group_size") else "")
    if strategy in ("tensor", "channel"):
        return Scheme(format=format_, bits=bits, group=None, symmetric=symmetric)
    if strategy != "group":
        raise _unsupported(reader, f"strategy {shown(strategy)}", ("tensor", "channel", "group"))
    return Scheme(format=format_, bits=bits, group=_group(reader), symmetric=symmetric)


def _gptq(reader: JsonReader) -> Scheme:
    _refuse(reader, {"dynamic": "settings per module", "is_marlin_format": "Marlin's layout"})
    bits = _bits(reader, (4, 8))
    if not reader.flag("sym", default=True):
        raise _unsupported(reader, "sym false (GPTQ with zero points)", ("sym true",))
    version = reader.text("checkpoint_format", default="gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _unsupported(reader, f"checkpoint_format {shown(version)}", ("gptq", "gptq_v2"))
    return Scheme(format=version, bits=bits, group=_group(reader), symmetric=True)


def _awq(reader: JsonReader) -> Scheme:
    bits = _bits(reader, (4,))
    version = reader.text("version", default="gemm").lower()
    if version != "gemm":
        raise _unsupported(reader, f"version {shown(version)}", ("gemm",))
    if not reader.flag("zero_point", default=True):
        raise _unsupported(reader, "zero_point false", ("zero_point true",))
    return Scheme(format="awq", bits=bits, group=_group(reader), symmetric=False)


def _bits(reader: JsonReader, widths: tuple[int, ...]) -> int:
    bits = reader.integer("bits", maximum=64)
    if bits not in widths:
        raise _unsupported(reader, f"{bits} bits", map(str, widths))
    return bits


def _group(reader: JsonReader) -> int | None:
    """Return the size of a group, or -1 for a whole row."""
    size = reader.integer("group_size", maximum=MAX_WIDTH, minimum=-1)
    if size == -1:
        return None
    if size < MIN_GROUP or size % MIN_GROUP:
        raise _unsupported(reader, f"group_size {size}", (f"multiples of {MIN_GROUP}", "-1"))
    return size


def _refuse(reader: JsonReader, features: Mapping[str, str]) -> None:
    """Raise if a key of a feature has a value that enables it."""
    for key, feature in features.items():
        value = reader.values.get(key)
        if isinstance(value, Mapping) and value.get("format") == "dense":
            continue
        if value not in (None, False, {}, []):
            raise _unsupported(reader, f"{feature} ({key})", ())


def _unsupported(reader: JsonReader, what: str, supported: Any) -> UnsupportedModelError:
    known = ", ".join(supported)
    known = f"; supported: {known}" if known else ""
    return UnsupportedModelError(f"{reader.source}: {what} is not supported{known} ({_REMEDY})")


def _patterns(reader: JsonReader, key: str) -> tuple[str, ...]:
    """Return names and patterns of modules. Every pattern ends soon for any name.

    A hostile pattern such as "(a*)*b" would take centuries, so groups may not be repeated.
    """
    names = reader.texts(key)
    if len(names) > MAX_PATTERNS:
        raise reader.error(key, f"must have at most {MAX_PATTERNS} names", names)
    patterns = list(_of_patterns(names))
    if len(patterns) > _MAX_OF_LIST:
        raise reader.error(key, f"must have at most {_MAX_OF_LIST} patterns (re:)", patterns)
    for name in patterns:
        repetitions = max(len(re.findall("[*+{]", name)), name.count("?"))
        if len(name) > _MAX_PATTERN or repetitions > _MAX_REPETITIONS or _OF_GROUP.search(name):
            limits = f"{_MAX_PATTERN} characters, with {_MAX_REPETITIONS} repetitions"
            raise reader.error(key, f"must have patterns of {limits} and none of a group", name)
        try:
            re.compile(name)
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"{reader.source}: {key} has a bad pattern: {error}") from error
    return names


def _of_patterns(names: tuple[str, ...]) -> Iterator[str]:
    every = (name.removeprefix("re:") for name in names if name.startswith("re:"))
    return (name.removesuffix("$").removesuffix(".*") for name in every)


def _matches(module: str, name: str) -> bool:
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    is_embedding = module.endswith("embed_tokens")
    return name in (module, "Embedding" if is_embedding else "Linear")
