"""Make a device ready for its first request: compile all kernels, and capture the common steps.

Which kernels a model needs follows from the steps themselves. They are first listed without being
launched, by steps of every kind and of the largest size. The largest step also allocates the memory
of the results. Then the kernels are compiled at once, and every kind of step runs on empty
sequences, so that nothing is left to load or to allocate. Such a step writes no keys and values.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.backend import Progress, StepBatch, StepSize
from mie.ops.sampling import GREEDY, RowControls
from mie.ops_gpu import kv_cache, sampling
from mie.ops_gpu.batch import (
    ANY_LENGTH,
    MAX_CHUNK_TOKENS,
    STEP_TOKENS,
    Bucket,
    padded_chunks,
    padded_decodes,
    padded_length,
    padded_seqs,
)
from mie.ops_gpu.cubins import KernelName
from mie.ops_gpu.dispatch import MAX_SPLITS, SPLIT_TOKENS
from mie.ops_gpu.launcher import CupyLauncher
from mie.ops_gpu.sampling import Sampler
from mie.ops_gpu.steps import MAX_CHUNK_GRAPHS, MAX_GRAPHS, Forward, Steps

MOST_SEQS = 64
"""Sequences of the largest step that is captured ahead."""

MOST_STEPS = 32
"""Maximum number of steps that are captured ahead, the smallest first. Each takes some 20 ms."""

PROMPTS = (2, 16, 32, 64)
"""Tokens of prompts that run ahead. The numbers are those at which products change their kernel."""

LAUNCH_BYTES = 64 << 10
"""Device memory of a launch in a graph.

Graphs of 500, 1,000 and 2,000 empty kernels took 362, 395 and 458 MB
(forums.developer.nvidia.com/t/244901, CUDA 11.2). Not measured with mie.
"""

MOST_DRAWN = 8
"""Rows for which the scratch memory of random draws is allocated ahead: 1.2 MB each at most."""

EVERY_KERNEL = RowControls(
    temperature=1.0, top_p=0.9, uniform=0.5, banned_ids=np.zeros(1, np.int64)
)
"""A row that every kernel of the sampler has work for."""


def make_ready(
    launcher: CupyLauncher,
    steps: Steps,
    sampler: Sampler,
    forward: Forward,
    size: StepSize,
    others: Sequence[KernelName],
    progress: Progress,
) -> None:
    """Compile the kernels of ``forward`` and the ``others``, and capture the common steps.

    No step is larger than ``size``.
    """
    counts = padded_counts(min(MOST_SEQS, size.num_seqs))
    prompts = [n for n in PROMPTS if n < size.num_tokens] + [size.num_tokens]
    num_groups = size.num_groups
    steps.most_tokens = size.num_tokens
    with launcher.listing() as listed:
        for count in counts:
            bucket = Bucket(count, padded_length(size.max_len))
            logits = steps.launch_empty(forward, bucket, num_groups)
        for num_tokens in prompts:
            length = max(num_tokens, size.max_len)
            steps.launch_prompt(forward, prompt(num_tokens, length, num_groups))
        for bucket in extremes_with_chunks(size):
            steps.launch_empty(forward, bucket, num_groups)
        sampler.start(logits[:1], [EVERY_KERNEL])
    launcher.build([*listed, *others], progress)
    for num_tokens in prompts[:-1]:
        steps.launch_prompt(forward, prompt(num_tokens, num_tokens, num_groups))
    for bucket in buckets(counts, size.max_len, steps.follows_lengths)[:MOST_STEPS]:
        logits = steps.run_empty(forward, bucket, num_groups)
        sampler.finish(sampler.start(logits, [GREEDY] * len(logits)))
    logits = logits[:MOST_DRAWN]
    sampler.finish(sampler.start(logits, [EVERY_KERNEL] * len(logits)))


def kernels_beside_steps(dtype: np.dtype[Any], kv_dtype: np.dtype[Any]) -> list[KernelName]:
    """Return the kernels of a model that no forward pass and no sampling launch."""
    taking = KernelName("take_tokens.cu", "take_tokens")
    return [*kv_cache.kernels(kv_dtype, dtype), sampling.kernel_of_logprobs(dtype), taking]


def buckets(counts: Sequence[int], max_len: int, follows_lengths: bool) -> list[Bucket]:
    """Return the steps that may be captured, the smallest first."""
    lengths = [padded_length(max_len) if follows_lengths else ANY_LENGTH]
    while follows_lengths and lengths[0] > SPLIT_TOKENS:
        lengths.insert(0, padded_length(min(lengths[0], MAX_SPLITS * SPLIT_TOKENS) // 2))
    return sorted(Bucket(count, length) for count in counts for length in lengths)


def padded_counts(most: int) -> list[int]:
    """Return the padded numbers of sequences of steps of up to ``most``."""
    return sorted({padded_seqs(n) for n in range(1, most + 1)})


def extremes_with_chunks(size: StepSize) -> list[Bucket]:
    """Return the captured step with the most sequences besides its chunks, and the smallest one.

    In the smallest one, blocks share the keys of the same rows, which takes memory of its own.
    """
    num_seqs = min(padded_decodes(size.num_seqs), size.num_tokens - 1)
    num_tokens = min(size.num_tokens - num_seqs, MAX_CHUNK_TOKENS)
    length = padded_length(size.max_len)
    if num_tokens <= 0:
        return []
    largest = Bucket(num_seqs, length, padded_chunks(size.num_seqs), num_tokens)
    return [largest, Bucket(0, length, 1, min(STEP_TOKENS[0], size.num_tokens))]


def graph_bytes(size: StepSize, follows_lengths: bool) -> int:
    """Estimate the device memory of the graphs of all steps that may be captured.

    A layer of decodes takes six launches, or ten with experts or a recurrence, and a step six more.
    Chunks take six more launches a layer, because their products and the operators around them are
    launched one by one.
    """
    counts = padded_counts(size.num_seqs)
    num_graphs = min(MAX_GRAPHS, len(buckets(counts, size.max_len, follows_lengths)))
    of_a_layer = 10 if size.num_chosen or size.num_recurrent_results else 6
    of_decodes, of_chunks = (n * size.num_layers + 6 for n in (of_a_layer, of_a_layer + 6))
    return (num_graphs * of_decodes + MAX_CHUNK_GRAPHS * of_chunks) * LAUNCH_BYTES


def prompt(num_tokens: int, length: int, num_groups: int = 1) -> StepBatch:
    """Return the last tokens of a sequence of that length. Their keys are not written."""
    zeros = np.zeros(num_tokens, np.int64)
    return StepBatch(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=np.full(num_groups * num_tokens, -1),
        cu_seqlens_q=np.array([0, num_tokens]),
        seq_lens=np.array([length]),
        block_tables=np.zeros((num_groups, ceil_div(length, 16)), np.int64),
        logits_rows=np.array([num_tokens - 1]),
        num_decodes=0,
        num_groups=num_groups,
    )
