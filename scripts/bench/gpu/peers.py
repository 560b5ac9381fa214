"""Run the peers, which compute the same with torch over the same numbers.

torch's own attention takes keys and values that are contiguous for each sequence. This flatters it,
because it looks nothing up, and making them is not timed. A peer whose error exceeds mie's limit is
not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from bench.gpu.device import SAMPLES, Samples, one_line, run_all
from bench.gpu.inputs import Inputs
from bench.gpu.numbers import ERRORS, relative_error
from bench.gpu.report import BenchReport
from bench.gpu.shapes import BLOCK_SIZE, PrefillShape
from bench.gpu.timing import rotating
from mie.ops.backend import Array

SDPA_BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")

Tensor = Any
Attend = Callable[[int], Tensor]
"""Computes attention [T, Hq, Dh] over the cache of that index."""


class TorchInputs:
    """The inputs of mie as tensors, made on first use."""

    def __init__(self, inputs: Inputs) -> None:
        self.mie = inputs

    @cached_property
    def queries(self) -> Tensor:
        """The queries [S, Hq, queries, Dh], contiguous."""
        q = tensor_of(self.mie.q)
        num_seqs = len(self.mie.host_batch.seq_lens)
        return q.view(num_seqs, -1, *q.shape[1:]).transpose(1, 2).contiguous()

    @cached_property
    def sets(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [S, Hkv, context, Dh] of each cache. All sequences have one length."""
        import torch

        tables = tensor_of(self.mie.batch.block_tables).long()
        tokens = torch.arange(self.mie.shape.context, device=tables.device)
        blocks = tables[:, tokens // BLOCK_SIZE]  # [S, context]
        found = []
        for layer in self.mie.cache.layers:
            kv = tensor_of(layer)[blocks, :, :, tokens % BLOCK_SIZE]  # [S, context, 2, Hkv, Dh]
            keys, values = kv.permute(2, 0, 3, 1, 4).contiguous()
            found.append((keys, values))
        return found


Way = Callable[[TorchInputs], Attend]


@dataclass(kw_only=True)
class Peer:
    """One version. Its error is known once it has been timed."""

    way: Way
    inputs: TorchInputs
    error: float = field(default=float("nan"), init=False)
    _attend: Attend | None = field(default=None, init=False)

    def samples(self) -> Samples:
        """Take one pass of samples in a CUDA graph, as for mie.

        Raises:
            ValueError: the result is wrong.
        """
        inputs = self.inputs.mie
        if self._attend is None:
            self._attend = self.way(self.inputs)
            self.error = error_of(inputs, self._attend)
        if not self.error <= ERRORS[inputs.shape.dtype]:
            raise ValueError(f"its result is off by {self.error:.1e}")
        return graph_samples(
            rotating([partial(self._attend, index) for index in range(inputs.num_sets)])
        )


def decode_peers(inputs: Inputs, report: BenchReport) -> dict[str, Peer]:
    """Return the peers that can run here. The others are skipped by name."""
    if inputs.cache.is_quantized:
        report.skip("peers of a quantised cache", "none of them has mie's formats")
        return {}
    if getattr(inputs.shape, "is_ragged", False):
        reason = "they take keys and values of one length"
        report.skip("torch SDPA and FlexAttention, ragged", reason)
        return {}
    return torch_peers(inputs, report, {**sdpa_ways(), "FlexAttention": flex})


def prefill_peers(inputs: Inputs, report: BenchReport) -> dict[str, Peer]:
    """Return the implementations of torch's scaled_dot_product_attention."""
    return torch_peers(inputs, report, sdpa_ways())


def sdpa_ways() -> dict[str, Way]:
    """Return each of torch's own implementations."""
    return {f"torch SDPA {name.lower()}": partial(sdpa, backend=name) for name in SDPA_BACKENDS}


def torch_peers(inputs: Inputs, report: BenchReport, ways: Mapping[str, Way]) -> dict[str, Peer]:
    """Return a peer for each way, over the same tensors."""
    reason = torch_is_missing(report.is_dry_run)
    if reason:
        for name in ways:
            report.skip(name, reason)
        return {}
    tensors = TorchInputs(inputs)
    return {name: Peer(way=way, inputs=tensors) for name, way in ways.items()}


def torch_is_missing(is_dry_run: bool) -> str:
    """Return why there is no torch with a device, or an empty string."""
    if is_dry_run:
        return "dry run"
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else "torch finds no device"


def tensor_of(array: Array) -> Tensor:
    """Return the array's memory as a tensor."""
    import torch

    if array.dtype.name != "bfloat16":
        return torch.from_dlpack(array)
    return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)


# The ways.


def sdpa(inputs: TorchInputs, backend: str) -> Attend:
    """Return scaled_dot_product_attention with one backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    q, sets, shape = inputs.queries, inputs.sets, inputs.mie.shape
    options: dict[str, Any] = {"enable_gqa": True}
    if isinstance(shape, PrefillShape) and shape.prefix:
        options["attn_mask"] = causal_lower_right(shape.num_queries, shape.context)
    elif isinstance(shape, PrefillShape):
        options["is_causal"] = True

    def attend(index: int) -> Tensor:
        with torch.inference_mode(), sdpa_kernel([getattr(SDPBackend, backend)]):
            return scaled_dot_product_attention(q, *sets[index], **options)

    return attend


def flex(inputs: TorchInputs) -> Attend:
    """Return FlexAttention, compiled for the shape."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    q, sets = inputs.queries, inputs.sets
    torch.compiler.reset()  # it keeps few compiled versions, and then stops compiling
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(index: int) -> Tensor:
        with torch.inference_mode():
            return compiled(q, *sets[index], enable_gqa=True)

    return attend


# Checking and timing.


def error_of(inputs: Inputs, attend: Attend) -> float:
    """Return the largest relative error over one cache, in the places where mie is checked."""
    num_tokens, num_heads, head_dim = inputs.q.shape
    out = attend(0).float()
    if out.dim() == 4:  # [S, Hq, queries, Dh]
        out = out.transpose(1, 2)
    got = out.reshape(num_tokens, num_heads, head_dim).cpu().numpy()
    return max(
        relative_error(got[token], inputs.wanted(0, token, row))
        for token, row in inputs.checked_places()
    )


def graph_samples(calls: Sequence[Callable[[], object]]) -> Samples:
    """Take one pass of samples from a graph of the calls."""
    import torch

    run_all(calls)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_all(calls)
        launch, method = graph.replay, "graph"
    except Exception as error:  # the row tells
        launch, method = partial(run_all, calls), f"eager ({one_line(error)})"
    torch_us(launch)
    values = [torch_us(launch) / len(calls) for _ in range(SAMPLES)]
    return Samples(method=method, values=values)


def torch_us(launch: Callable[[], object]) -> float:
    """Return the microseconds between two events around a launch."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch()
    end.record()
    end.synchronize()
    return 1000.0 * float(start.elapsed_time(end))
