"""Read a LoRA adapter from a directory of PEFT or from a GGUF file, or refuse it by name.

An adapter is untrusted input, like a model. Its headers are checked against the model first, and
then its numbers. A setting that changes the result, and that mie does not have, is refused.

Sources: ``LoraConfig`` in https://github.com/huggingface/peft, and for GGUF
``convert_lora_to_gguf.py`` and ``src/llama-adapter.cpp`` in https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mie.base.files import read_json_object
from mie.checkpoint.entries import TensorEntry, some
from mie.checkpoint.gguf.architectures import ARCHITECTURES, layer_names
from mie.checkpoint.gguf.header import read_gguf
from mie.checkpoint.gguf.weights import head_order, hf_names
from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.safetensors_header import read_header
from mie.checkpoint.size_limits import MAX_JSON_BYTES
from mie.checkpoint.tensors import Shape
from mie.checkpoint.weights import Checkpoint, text_name
from mie.errors import ModelError, UnsupportedModelError, WeightsError, shown
from mie.model.config import ModelConfig
from mie.ops.adapters.low_rank import LowRank

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_ALPHA = 1e6
"""Maximum of ``lora_alpha``. Adapters have 8 … 512."""

_READ = {
    *("peft_type", "task_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("bias", "init_lora_weights"),
}
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "megatron_core", "runtime_config", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
"""Settings of training, and lists of the modules that have tensors in the file."""
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""The values of ``init_lora_weights`` that leave the weights of the model unchanged."""
_PEFT = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_GGUF = re.compile(r"(.+\.weight)\.lora_([ab])")
_REFUSED = (
    ("lora_magnitude_vector", "DoRA"),
    ("lora_embedding_", "adapters of embeddings"),
    ("embed_tokens", "adapters of embeddings"),
    ("token_embd", "adapters of embeddings"),
    ("lm_head", "adapters of the output head"),
    ("output.weight", "adapters of the output head"),
    ("experts", "adapters of experts"),
    ("_exps", "adapters of experts"),
    (".bias", "adapters with biases"),
)
"""Parts of tensors' names, and their meaning."""
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterFile:
    """An adapter that was read and checked."""

    changes: Mapping[str, LowRank]
    """The changes by the names of the model's tensors."""
    digest: str
    """A digest of all numbers. Equal adapters have equal digests."""

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(change.rank for change in self.changes.values())


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """The two tensors of a change, and its scale."""

    a: str
    b: str
    scale: float
    num_heads: int = 0
    """Number of heads with interleaved rows in the file, or 0."""


def read_adapter(
    path: str | os.PathLike[str], shapes: Mapping[str, Shape], model: ModelConfig, max_rank: int
) -> AdapterFile:
    """Read the adapter in a directory of PEFT, or in a GGUF file.

    ``shapes`` are the shapes of the model's tensors that adapters can change.

    Raises:
        UnsupportedModelError: the adapter has a feature that is not supported.
        ModelError: the adapter is broken, has a rank above ``max_rank``, or is of another model.
    """
    path = Path(os.path.expanduser(path))  # Path.expanduser raises for an unknown user
    if os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        entries, pairs = _peft(path, shapes, max_rank)
    elif os.path.isfile(path):
        entries, pairs = _gguf(path, shapes, model, max_rank)
    else:
        raise ModelError(
            f"adapter {str(path)!r} does not exist; an adapter is a directory with {CONFIG_FILE} "
            f"and {WEIGHTS_FILE}, or a .gguf file"
        )
    if not pairs:
        raise WeightsError(f"{path} holds no change of a matrix")
    with Checkpoint(entries) as checkpoint:
        changes = {name: _change(checkpoint, pairs[name]) for name in shapes if name in pairs}
    return AdapterFile(changes=changes, digest=_digest(changes))


def _change(checkpoint: Checkpoint, pair: _Pair) -> LowRank:
    numbers = []
    for name in (pair.a, pair.b):
        numbers.append(checkpoint.read(name).astype(np.float32))
        checkpoint.check_values(name, numbers[-1])
        checkpoint.release(name)
    a, b = numbers
    if pair.num_heads:
        b = b[head_order(len(b), pair.num_heads)]
    return LowRank(a=a, b=b, scale=pair.scale)


def _digest(changes: Mapping[str, LowRank]) -> str:
    digest = hashlib.sha256()
    for name, change in sorted(changes.items()):
        digest.update(f"{name}\0{change.scale!r}\0{change.a.shape}\0".encode())
        digest.update(change.a.tobytes())
        digest.update(change.b.tobytes())
    return digest.hexdigest()


def _checked_pairs(
    path: Path,
    entries: Mapping[str, TensorEntry],
    tensors: Iterator[tuple[str, str | None, str]],
    shapes: Mapping[str, Shape],
    max_rank: int,
) -> dict[str, dict[str, str]]:
    """Return the names in the file of A and B ("a", "b") of each tensor of the model.

    ``tensors`` are (name in the file, name in the model or None, "a" or "b").
    """
    pairs: dict[str, dict[str, str]] = {}
    unknown = []
    for own, name, kind in tensors:
        if name is None or name not in shapes:
            unknown.append(own)
        else:
            other = pairs.setdefault(name, {}).setdefault(kind, own)
            if other != own:
                raise WeightsError(
                    f"{path}: tensors {shown(other)} and {shown(own)} are both {kind.upper()} of "
                    f"{name} (remove one of them)"
                )
    for own in unknown:
        for part, what in _REFUSED:
            if part in own:
                raise UnsupportedModelError(
                    f"{path}: tensor {shown(own)}: {what} are not supported (merge the adapter "
                    "into the model, or train without them)"
                )
    if unknown:
        raise WeightsError(
            f"{path} changes {len(unknown)} tensors that are no matrices of attention or of MLPs "
            f"of this model: {some(unknown)} (use the model that the adapter was trained for)"
        )
    for name, pair in pairs.items():
        if len(pair) != 2:
            raise WeightsError(f"{path}: the change of {name} has only {shown([*pair.values()])}")
        a, b = entries[pair["a"]], entries[pair["b"]]
        rank = a.shape[0] if len(a.shape) == 2 else 0
        if not rank or (*b.shape, *a.shape) != (shapes[name][0], rank, rank, shapes[name][1]):
            raise WeightsError(
                f"{path}: A and B of {name} have the shapes {list(a.shape)} and {list(b.shape)}; "
                f"the matrix is {list(shapes[name])} (use the model that the adapter was trained "
                "for)"
            )
        if rank > max_rank:
            raise ModelError(
                f"{path}: the change of {name} has rank {rank}; max_lora_rank is {max_rank} "
                f"(raise max_lora_rank to at least {rank})"
            )
        for each in (a, b):
            if each.dtype not in _FLOATS:
                raise UnsupportedModelError(
                    f"{path}: the change of {name} is in {each.dtype}; adapters are read in "
                    f"{', '.join(_FLOATS)}"
                )
    return pairs


# PEFT.


def _peft(
    path: Path, shapes: Mapping[str, Shape], max_rank: int
) -> tuple[Mapping[str, TensorEntry], Mapping[str, _Pair]]:
    config = _PeftConfig.read(path / CONFIG_FILE)
    if not (path / WEIGHTS_FILE).exists() and (path / "adapter_model.bin").exists():
        raise UnsupportedModelError(
            f"{path} has only adapter_model.bin: PyTorch pickles are not read, since they can run "
            "code; save the adapter again with save_pretrained of PEFT, which writes safetensors"
        )
    entries = read_header(path / WEIGHTS_FILE)
    found = _checked_pairs(path, entries, _peft_names(entries), shapes, max_rank)
    pairs = {}
    for name, own in found.items():
        rank = entries[own["a"]].shape[0]
        scale = config.scale(_module(own["a"]), rank)
        pairs[name] = _Pair(a=own["a"], b=own["b"], scale=scale)
    return entries, pairs


def _peft_names(entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, str | None, str]]:
    for own in entries:
        match = _PEFT.fullmatch(own)
        if match is None:
            yield own, None, ""
        else:
            yield own, f"{text_name(match[1])}.weight", match[2].lower()


def _module(own: str) -> str:
    """Return the name of a tensor's module, as PEFT compares it with patterns."""
    match = _PEFT.fullmatch(own)
    assert match is not None
    return match[1]


@dataclass(frozen=True, kw_only=True)
class _PeftConfig:
    """The settings of an adapter that choose the scales of its changes."""

    source: str
    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    uses_root: bool
    """Whether the scale is alpha / sqrt(r), as in rsLoRA (https://arxiv.org/abs/2312.03732)."""

    @classmethod
    def read(cls, path: Path) -> _PeftConfig:
        reader = JsonReader(
            values=read_json_object(path, MAX_JSON_BYTES, ModelError), source=str(path)
        )
        kind, task = reader.text("peft_type"), reader.text("task_type", default="CAUSAL_LM")
        if kind != "LORA":
            raise _unsupported(path, "peft_type", kind, "only LORA")
        if task != "CAUSAL_LM":
            raise _unsupported(path, "task_type", task, "only CAUSAL_LM")
        if reader.text("bias", default="none") != "none":
            raise _unsupported(path, "bias", reader.values["bias"], "only none")
        start = reader.values.get("init_lora_weights")
        if start not in _PLAIN_STARTS:
            hint = "it changes the weights of the model, too; convert the adapter to plain LoRA"
            raise _unsupported(path, "init_lora_weights", start, hint)
        for key, value in reader.values.items():
            if key not in _READ | _WITHOUT_EFFECT and value not in (None, False, [], {}):
                raise _unsupported(path, key, value, "train without it, or merge the adapter")
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in reader.nested(key).values:
                if not re.fullmatch(r"\^?[\w.]+", pattern):
                    raise _unsupported(path, key, pattern, "only names of modules")
        return cls(
            source=str(path),
            rank=reader.integer("r", maximum=1 << 16),
            alpha=reader.number("lora_alpha", low=-MAX_ALPHA, high=MAX_ALPHA),
            ranks=reader.nested("rank_pattern").values,
            alphas=reader.nested("alpha_pattern").values,
            uses_root=reader.flag("use_rslora", default=False),
        )

    def scale(self, module: str, rank: int) -> float:
        """Return the scale of a module's change with this rank in the file.

        Raises:
            ModelError: the settings state another rank, or an alpha that is no number.
        """
        stated, alpha = _of(self.ranks, module, self.rank), _of(self.alphas, module, self.alpha)
        if stated != rank:
            raise WeightsError(
                f"{self.source} states rank {shown(stated)} for {module}; its tensors have {rank}"
            )
        values = JsonReader(values={"alpha_pattern": alpha}, source=self.source)
        alpha = values.number("alpha_pattern", low=-MAX_ALPHA, high=MAX_ALPHA)
        return alpha / (math.sqrt(rank) if self.uses_root else rank)


def _of(patterns: Mapping[str, Any], module: str, default: float) -> Any:
    """Return the value of the first pattern that is the end of a module's name.

    PEFT reads patterns as regexes. `_PeftConfig.read` refuses all but plain names.
    """
    for pattern, value in patterns.items():
        if module == pattern.removeprefix("^") or module.endswith(f".{pattern}"):
            return value
    return default


# GGUF.


def _gguf(
    path: Path, shapes: Mapping[str, Shape], model: ModelConfig, max_rank: int
) -> tuple[Mapping[str, TensorEntry], Mapping[str, _Pair]]:
    header = read_gguf(path)
    values = JsonReader(values=header.values, source=str(path))
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if values.text(key, default="model") != wanted:
            raise _unsupported(path, key, header.values.get(key), f"an adapter has {wanted!r}")
    name = values.text("general.architecture")
    if name not in ARCHITECTURES:
        raise _unsupported(path, "general.architecture", name, ", ".join(ARCHITECTURES))
    for key in header.values:
        if key.startswith("adapter.") and key not in ("adapter.type", "adapter.lora.alpha"):
            raise _unsupported(path, key, header.values[key], "only plain LoRA")
    alpha = values.number("adapter.lora.alpha", low=-MAX_ALPHA, high=MAX_ALPHA)
    names = _gguf_names(header.tensors, layer_names(header.values))
    found = _checked_pairs(path, header.tensors, names, shapes, max_rank)
    of_kind = {"q": model.num_heads, "k": model.num_kv_heads}
    pairs = {}
    for name_of_model, own in found.items():
        kind = re.search(r"\.self_attn\.([qk])_proj\.", name_of_model)
        is_permuted = kind is not None and ARCHITECTURES[name].is_permuted
        pairs[name_of_model] = _Pair(
            a=own["a"],
            b=own["b"],
            # llama.cpp takes an alpha of 0 as a scale of 1.
            scale=alpha / header.tensors[own["a"]].shape[0] if alpha else 1.0,
            num_heads=of_kind[kind[1]] if kind is not None and is_permuted else 0,
        )
    return header.tensors, pairs


def _gguf_names(
    entries: Mapping[str, TensorEntry], parts: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str | None, str]]:
    for own in entries:
        match = _GGUF.fullmatch(own)
        names = hf_names(match[1], parts) if match else []
        if match is None or len(names) != 1:
            yield own, None, ""
        else:
            yield own, names[0], match[2]


def _unsupported(path: Path, key: str, value: object, hint: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{path}: {key} {shown(value)} is not supported ({hint})")
