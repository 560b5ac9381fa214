"""Compute the rotation frequencies of rotary position embeddings (RoPE).

A pair of channels ``j`` of a head turns by ``position * inv_freq[j]`` radians. Queries and keys are
then multiplied by ``attention_scaling``. The scalings below extend a model's context beyond its
training by turning some pairs more slowly. All of them depend on the configuration and on the
largest number of positions, never on the current length, so a key can be cached once it is rotated.
"""

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import log, power
from mie.model.config import RopeConfig

FloatArray: TypeAlias = NDArray[np.float64]


def rope_inv_freq(
    rope: RopeConfig, head_dim: int, max_position_embeddings: int, num_positions: int = 0
) -> tuple[FloatArray, float]:
    """Return the radians per position of each channel pair, and the factor for cos and sin.

    Args:
        rope: the kind of scaling and its parameters.
        head_dim: Dh, even.
        max_position_embeddings: replaces ``rope.original_max_position_embeddings`` if that is
            None, as in Hugging Face transformers.
        num_positions: LongRoPE has its long factors if this exceeds the original context.

    Returns:
        ``inv_freq`` float64 [P] of the pairs that turn, and ``attention_scaling``, by which both
        cos and sin are multiplied (1.0 except for YaRN and LongRoPE).

    Without scaling it is ``theta ** (-2j / Dh)`` (Su et al., 2021, arXiv:2104.09864, 3.2.2).

    Source: ``modeling_rope_utils.py`` of transformers. It computes in float32. Here everything is
    float64, and equal on every machine.
    """
    num_pairs = rope.num_pairs(head_dim)
    plain = np.array([power(rope.theta, -j, num_pairs) for j in range(num_pairs)])
    original_context = rope.original_max_position_embeddings or max_position_embeddings
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain, original_context), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, plain, original_context), yarn_attention_scaling(rope)
    if rope.rope_type == "longrope":
        factors = rope.long_factor if num_positions > original_context else rope.short_factor
        return plain / factors, _longrope_attention_scaling(rope, original_context)
    assert rope.rope_type == "default", rope.rope_type
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: FloatArray, original_context: int) -> FloatArray:
    """Slow down slow pairs by ``factor``, keep fast pairs, and blend between; float64 [Dh/2].

    A pair that turns fewer than ``low_freq_factor`` times within the original context is slow. A
    pair that turns more than ``high_freq_factor`` times is fast.

    Source: ``apply_scaling`` in the reference code of Llama 3.1 (meta-llama/llama-models).
    """
    turns = original_context * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return np.asarray(keep * plain + (1 - keep) * plain / rope.factor, dtype=np.float64)


def _yarn(rope: RopeConfig, plain: FloatArray, original_context: int) -> FloatArray:
    """Keep fast pairs, slow down slow pairs by ``factor``, and ramp between; float64 [Dh/2].

    Source: "NTK-by-parts" interpolation, Peng et al. 2023 (YaRN), arXiv:2309.00071, section 3.2.
    The ramp is linear in the pair's index, as in the authors' code and in transformers.
    """
    first, last = _yarn_ramp(rope, 2 * len(plain), original_context)
    slowed = np.clip((np.arange(len(plain)) - first) / (last - first), 0.0, 1.0)
    return np.asarray(slowed * plain / rope.factor + (1 - slowed) * plain, dtype=np.float64)


def _yarn_ramp(rope: RopeConfig, head_dim: int, original_context: int) -> tuple[float, float]:
    """Return the pair indices between which the ramp rises (``beta_fast``, ``beta_slow`` turns)."""

    def pair_that_turns(turns: float) -> float:
        wavelengths = original_context / (turns * 2 * math.pi)
        return head_dim * log(wavelengths) / (2 * log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last + 0.001 if first == last else last  # avoids a ramp of zero width


def yarn_attention_scaling(rope: RopeConfig) -> float:
    """Return the factor on cos and sin: ``0.1 ln(factor) + 1`` by default.

    ``attention_factor`` overrides it. If ``mscale`` and ``mscale_all_dim`` are both set, the ratio
    of two such terms replaces it.

    Source: arXiv:2309.00071, section 3.4 (sqrt(1/t)); the ratio is from DeepSeek-V2's code.
    """
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def _longrope_attention_scaling(rope: RopeConfig, original_context: int) -> float:
    """Return the factor on cos and sin, the same for both lists of factors.

    Source: Ding et al., 2024 (LongRoPE), arXiv:2402.13753, and the code of Phi-3.
    """
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + log(rope.factor) / log(original_context))


def rope_channels(head_dim: int, num_pairs: int, is_interleaved: bool) -> NDArray[np.intp]:
    """Return the order of a head's channels in which pair i is (i, i + Dh/2), as int [Dh].

    Backends rotate such pairs. Queries and keys with the same new order of channels have the same
    products. The first 2P channels are the pairs that turn: (2i, 2i + 1) if they are interleaved,
    else (i, i + P). The others follow.
    """
    turning, others = np.arange(2 * num_pairs), np.arange(2 * num_pairs, head_dim)
    pairs = turning.reshape(-1, 2) if is_interleaved else turning.reshape(2, -1).T
    order: NDArray[np.intp] = np.concatenate([pairs, others.reshape(2, -1).T]).T.ravel()
    return order
