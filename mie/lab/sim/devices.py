"""Read the known devices from `catalog.json`, and compute the costs of a model on one.

The ledger of machine code and the pages about GPUs read the same table.

Bandwidths and FLOP rates are published ones (the CPU's were measured). The fraction of them that is
reached and the overheads of a step are calibrated with decode steps where docs/gpu/predictions.md
has some of the device. Elsewhere they are assumptions that plain engines of this size roughly meet.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mie.base.arithmetic import ceil_div
from mie.checkpoint.config import load_model_config, model_config_from_hf
from mie.checkpoint.locate import locate_model
from mie.checkpoint.tensors import kv_bytes_per_token, num_parameters
from mie.errors import ConfigError
from mie.lab.sim.costs import Costs
from mie.model.config import ModelConfig
from mie.model.layout import CacheLayout


def read_catalog() -> Any:
    """Return the devices and the models of `catalog.json`."""
    return json.loads(Path(__file__).with_name("catalog.json").read_text(encoding="utf-8"))


SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(read_catalog()["models"])
"""Shapes as in their ``config.json``, without weights."""


def find_shape(name: str) -> ModelConfig:
    """Return the shape of a model in the table, or of a model that `locate_model` finds.

    Raises:
        ModelError: it is neither, or its ``config.json`` cannot be used.
    """
    if name in SHAPES:
        return model_config_from_hf(SHAPES[name], source=name)
    return load_model_config(locate_model(name))


PICO = 10**12


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU in CUDA's terms, with the shared memory that the CUDA C++ Programming Guide states."""

    name: str
    """A part of the name that CUDA gives."""
    num_multiprocessors: int
    shared_bytes: int
    """Shared memory of a multiprocessor."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The capabilities of a machine."""

    title: str
    memory_bytes: int
    """Bytes of memory. An engine uses nine tenths at most, as vLLM does."""
    bandwidth: int
    """Memory bandwidth in bytes a second."""
    flops: int
    """Dense floating-point operations a second in matrix products of ``itemsize`` bytes."""
    host_bandwidth: int
    """Bandwidth in bytes a second to the memory that blocks are swapped out to."""
    itemsize: int
    source: str
    """The source of these numbers."""
    # The following are calibrated or assumed.
    bandwidth_percent: int
    gemm_percent: int
    attention_percent: int
    step_ns: int
    """Overhead of a step: scheduling, packing, sampling, and returning the result."""
    layer_ns: int
    """Time to launch a layer's kernels."""
    seq_ns: int
    """Host time for each sequence."""
    gpu: Gpu | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Device":
        """Return a device of `catalog.json`."""
        gpu = values.get("gpu")
        return cls(**{**values, "gpu": Gpu(**gpu) if gpu else None})


DEVICES: Mapping[str, Device] = MappingProxyType(
    {name: Device.from_json(values) for name, values in read_catalog()["devices"].items()}
)


def find_device(name: str) -> Device:
    """Return the device of that name, or raise `ConfigError`."""
    if name not in DEVICES:
        raise ConfigError(f"device {name!r} is not in the table; it has {', '.join(DEVICES)}")
    return DEVICES[name]


def costs_on(
    device: Device,
    model: ModelConfig,
    layout: CacheLayout | None = None,
    *,
    layer_bits: float | None = None,
    head_bits: float | None = None,
) -> Costs:
    """Return the costs of the model's steps on the device.

    A weight of the layers takes ``layer_bits`` and one of the head ``head_bits``, scales included.
    By default both have the device's itemsize.
    A token costs two operations for each weight that it uses, and `_recurrence_flops`. A pair of
    tokens costs four for each channel of each query head. Keys and values are read once a step for
    each sequence, and states are read and written. A block that is copied or swapped has the layers
    of ``layout``, by default all.
    """
    head = model.vocab_size * model.hidden_size
    embeddings = 0 if model.tie_word_embeddings else head  # looked up; a tied one is also the head
    layers = num_parameters(model) - embeddings - head
    layer_bits, head_bits = layer_bits or 8 * device.itemsize, head_bits or 8 * device.itemsize
    weight_bytes = ceil((layers * layer_bits + head * head_bits) / 8)
    num_windows = model.num_layers - model.layer_windows.count(None)
    num_whole = model.num_attention_layers - num_windows
    layer_bytes = kv_bytes_per_token(model, device.itemsize) // max(1, model.num_attention_layers)
    block_bytes = layer_bytes * (layout.num_layers if layout else model.num_attention_layers)
    memory = device.bandwidth * device.bandwidth_percent
    gemm = device.flops * device.gemm_percent
    attention = device.flops * device.attention_percent
    pair_flops = 4 * model.num_heads * model.head_dim
    return Costs(
        step_ps=1000 * (device.step_ns + model.num_layers * device.layer_ns),
        weights_ps=_ps(weight_bytes, memory),
        token_ps=_ps(2 * (layers - _num_unused(model)), gemm)
        + _ps(_recurrence_flops(model), attention),
        logits_ps=_ps(2 * head, gemm),
        pair_ps=_ps(num_whole * pair_flops, attention),
        context_ps=_ps(num_whole * layer_bytes, memory),
        seq_ps=1000 * device.seq_ns,
        copy_ps=_ps(2 * block_bytes, memory),  # each byte is read and written
        swap_ps=_ps(block_bytes, device.host_bandwidth * 100),
        window_pair_ps=_ps(num_windows * pair_flops, attention),
        window_context_ps=_ps(num_windows * layer_bytes, memory),
        state_ps=_ps(state_bytes(model), memory),
        state_swap_ps=_ps(state_bytes(model), device.host_bandwidth * 100),
    )


def window_of(model: ModelConfig) -> int | None:
    """Return the positions that layers with a window read, or None without such layers."""
    return max((size for size in model.layer_windows if size is not None), default=None)


def state_bytes(model: ModelConfig) -> int:
    """Return the bytes of a sequence's recurrent states in float32. 0 if it has none."""
    if model.recurrent is None:
        return 0
    return 4 * model.recurrent.shape.num_elements * model.layers_recurrent.count(True)


def _recurrence_flops(model: ModelConfig) -> int:
    """Return the operations of a token in the recurrences. Their states are not weights.

    The gated delta rule costs seven for each number of a state: one for its decay, and two each for
    k'S, for adding k d', and for q'S. Mamba 2 has no k'S.
    """
    if model.recurrent is None:
        return 0
    shape = model.recurrent.shape
    each = {"conv": 0, "delta": 7, "mamba": 5}[shape.kind]
    return each * shape.key_dim * shape.width * model.layers_recurrent.count(True)


def _num_unused(model: ModelConfig) -> int:
    """Return the number of weights that a token does not use: of experts that are not chosen."""
    if model.experts is None:
        return 0
    experts, hidden = model.experts, model.hidden_size
    of_one = 3 * hidden * experts.size + experts.has_biases * (2 * experts.size + hidden)
    return of_one * (experts.number - experts.num_chosen) * sum(experts.layers)


def _ps(amount: int, percent_a_second: int) -> int:
    """Return the picoseconds for an amount at hundredths of a rate."""
    return ceil_div(amount * 100 * PICO, percent_a_second)


def memory_beside(device: Device, model: ModelConfig, block_bytes: int) -> int:
    """Return the bytes for blocks and states, or raise `ConfigError` if no block fits."""
    weights = num_parameters(model) * device.itemsize
    left = device.memory_bytes * 9 // 10 - weights
    if left < block_bytes:
        raise ConfigError(
            f"the weights take {weights} bytes; nine tenths of {device.title}'s memory are "
            f"{device.memory_bytes * 9 // 10}, which leaves no block (use a smaller model, or a "
            "larger device)"
        )
    return left
