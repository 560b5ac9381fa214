"""List some devices, and compute what a model costs on one.

Bandwidths and FLOP rates are published ones (the CPU's were measured). The fraction of them that is
reached and the overheads of a step are assumptions that plain engines of this size roughly meet.
`mie sim calibrate` replaces them with a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mie.arithmetic import ceil_div
from mie.checkpoint.config import ModelConfig
from mie.checkpoint.tensors import num_parameters
from mie.errors import ConfigError
from mie.sim.costs import Costs

PICO = 10**12


@dataclass(frozen=True, kw_only=True)
class Device:
    """The capabilities of a machine."""

    title: str
    memory_bytes: int
    """Bytes of memory, of which an engine uses nine tenths at most, as vLLM does."""
    bandwidth: int
    """Memory bandwidth in bytes a second."""
    flops: int
    """Dense floating-point operations a second in matrix products of ``itemsize`` bytes."""
    host_bandwidth: int
    """Bandwidth in bytes a second to the memory that blocks are swapped out to."""
    itemsize: int
    source: str
    """The source of these numbers."""
    # The following are assumed.
    bandwidth_percent: int
    gemm_percent: int
    attention_percent: int
    step_ns: int
    """Overhead of a step: scheduling, packing, sampling, and returning the result."""
    layer_ns: int
    """Time to launch a layer's kernels."""
    seq_ns: int
    """Host time for each sequence."""


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "jetson-orin-nano": Device(
            title="NVIDIA Jetson Orin Nano 8 GB (Super clocks)",
            memory_bytes=6_000_000_000,
            bandwidth=102_000_000_000,
            flops=17_000_000_000_000,
            host_bandwidth=51_000_000_000,
            itemsize=2,
            source="NVIDIA, Jetson Orin Nano Super Developer Kit data sheet: 102 GB/s, 17 dense "
            "FP16 TFLOPS; 8 GB, of which about 6 are left beside the system; swapping copies "
            "within the one memory, so at half its bandwidth",
            bandwidth_percent=80,
            gemm_percent=50,
            attention_percent=30,
            step_ns=1_500_000,
            layer_ns=60_000,
            seq_ns=8_000,
        ),
        "a10g": Device(
            title="NVIDIA A10G 24 GB",
            memory_bytes=24_000_000_000,
            bandwidth=600_000_000_000,
            flops=70_000_000_000_000,
            host_bandwidth=25_000_000_000,
            itemsize=2,
            source="NVIDIA, A10G data sheet for AWS G5: 24 GB, 600 GB/s, 70 dense FP16 TFLOPS; "
            "PCIe 4.0 x16, 25 GB/s of 32",
            bandwidth_percent=80,
            gemm_percent=60,
            attention_percent=35,
            step_ns=500_000,
            layer_ns=30_000,
            seq_ns=2_000,
        ),
        "a100": Device(
            title="NVIDIA A100 SXM 80 GB",
            memory_bytes=80_000_000_000,
            bandwidth=2_039_000_000_000,
            flops=312_000_000_000_000,
            host_bandwidth=25_000_000_000,
            itemsize=2,
            source="NVIDIA, A100 data sheet: 80 GB, 2,039 GB/s, 312 dense FP16 TFLOPS; PCIe 4.0 "
            "x16, 25 GB/s of 32",
            bandwidth_percent=80,
            gemm_percent=60,
            attention_percent=35,
            step_ns=500_000,
            layer_ns=20_000,
            seq_ns=2_000,
        ),
        "rtx-5090": Device(
            title="NVIDIA GeForce RTX 5090 32 GB",
            memory_bytes=32_000_000_000,
            bandwidth=1_792_000_000_000,
            flops=209_500_000_000_000,
            host_bandwidth=50_000_000_000,
            itemsize=2,
            source="NVIDIA, RTX Blackwell GPU architecture: 32 GB, 1,792 GB/s, 209.5 dense FP16 "
            "TFLOPS with FP32 accumulation; PCIe 5.0 x16, 50 GB/s of 64",
            bandwidth_percent=80,
            gemm_percent=60,
            attention_percent=35,
            step_ns=500_000,
            layer_ns=20_000,
            seq_ns=2_000,
        ),
        "h200": Device(
            title="NVIDIA H200 SXM 141 GB",
            memory_bytes=141_000_000_000,
            bandwidth=4_800_000_000_000,
            flops=989_000_000_000_000,
            host_bandwidth=50_000_000_000,
            itemsize=2,
            source="NVIDIA, H200 data sheet: 141 GB, 4.8 TB/s, 1,979 sparse BF16 TFLOPS, half of "
            "it dense; PCIe 5.0 x16, 50 GB/s of 64",
            bandwidth_percent=80,
            gemm_percent=50,
            attention_percent=30,
            step_ns=500_000,
            layer_ns=20_000,
            seq_ns=2_000,
        ),
        "cpu-2-cores": Device(
            title="two cores of an AMD Zen 5 server with AVX-512",
            memory_bytes=8_000_000_000,
            bandwidth=50_000_000_000,
            flops=527_000_000_000,
            host_bandwidth=25_000_000_000,
            itemsize=4,
            source="measured: 50 GB/s read by two threads, 527 GFLOP/s of float32 FMA; 8 GB and "
            "half the bandwidth for a copy are assumed",
            bandwidth_percent=85,
            gemm_percent=70,
            attention_percent=15,
            step_ns=500_000,
            layer_ns=40_000,
            seq_ns=20_000,
        ),
    }
)


def find_device(name: str) -> Device:
    """Return the device of that name, or raise `ConfigError`."""
    if name not in DEVICES:
        raise ConfigError(f"device {name!r} is not in the table; it has {', '.join(DEVICES)}")
    return DEVICES[name]


def costs_on(device: Device, model: ModelConfig) -> Costs:
    """Return what the model's steps cost on the device. Attention windows count as full attention.

    A token costs two operations for each weight of the layers. A pair of tokens costs four for each
    channel of each query head. Keys and values are read once a step for each sequence.
    """
    head = model.vocab_size * model.hidden_size
    embeddings = 0 if model.tie_word_embeddings else head  # looked up; a tied one is also the head
    layers = num_parameters(model) - embeddings - head
    kv_bytes = model.kv_bytes_per_token(device.itemsize)
    memory = device.bandwidth * device.bandwidth_percent
    gemm = device.flops * device.gemm_percent
    attention = device.flops * device.attention_percent
    pair_flops = 4 * model.num_layers * model.num_heads * model.head_dim
    return Costs(
        step_ps=1000 * (device.step_ns + model.num_layers * device.layer_ns),
        weights_ps=_ps((layers + head) * device.itemsize, memory),
        token_ps=_ps(2 * layers, gemm),
        logits_ps=_ps(2 * head, gemm),
        pair_ps=_ps(pair_flops, attention),
        context_ps=_ps(kv_bytes, memory),
        seq_ps=1000 * device.seq_ns,
        copy_ps=_ps(2 * kv_bytes, memory),  # read and written
        swap_ps=_ps(kv_bytes, device.host_bandwidth * 100),
    )


def _ps(amount: int, percent_a_second: int) -> int:
    """Return the picoseconds for an amount at hundredths of a rate."""
    return ceil_div(amount * 100 * PICO, percent_a_second)


def blocks_on(device: Device, model: ModelConfig, block_size: int) -> int:
    """Return how many blocks fit beside the weights, or raise `ConfigError` if none does."""
    weights = num_parameters(model) * device.itemsize
    block = block_size * model.kv_bytes_per_token(device.itemsize)
    num_blocks = (device.memory_bytes * 9 // 10 - weights) // block
    if num_blocks < 1:
        raise ConfigError(
            f"the weights take {weights} bytes; nine tenths of {device.title}'s memory are "
            f"{device.memory_bytes * 9 // 10}, which leaves no block (use a smaller model, or a "
            "larger device)"
        )
    return num_blocks
