"""Compare the kernels of recurrent layers with the NumPy operators, and run models that have them.

test_kernels.py says which modes there are.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from safetensors.numpy import save_file
from test_graphs import DEVICES
from test_kernels import check, dtype, make_backend, mode, normal, wide

from mie import LLM, SamplingParams
from mie.checkpoint.config import model_config_from_hf
from mie.checkpoint.tensors import expected_tensors
from mie.ops import activation
from mie.ops.backend import StepBatch
from mie.ops.layers import recurrent
from mie.ops.layers.operators import RecurrentWeights
from mie.ops.layers.recurrent_shape import Kind, RecurrentShape
from mie.ops_gpu.recurrent import CONV_TILE

__all__ = ["dtype", "mode"]
pytestmark = needs_compiler

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


def shape_of(kind: Kind, *sizes: int) -> RecurrentShape:
    """Return a shape of (W, G, H, Dk, Dv)."""
    names = ("kernel_size", "num_groups", "num_heads", "key_dim", "value_dim")
    return RecurrentShape(kind=kind, **dict(zip(names, sizes, strict=True)))


SHAPES = [
    shape_of("delta", 4, 2, 4, 128, 40),
    shape_of("mamba", 4, 1, 3, 130, 33),
    shape_of("delta", 3, 1, 1, 5, 1),
    shape_of("mamba", 2, 2, 2, 64, 64),
]
NUM_SLOTS = 6
# Tokens, slots and whether they are fresh: decodes, chunks above and below a tile of each kernel,
# and padding, whose slot is -1.
SEQUENCES = [(1, 3, False), (CONV_TILE + 9, 0, True), (1, 5, True), (8, 4, False), (2, -1, False)]
DECODES = [(1, 2, False), (1, 0, True), (1, -1, False), (1, 4, False)]


def batch_of(sequences: list[tuple[int, int, bool]]) -> StepBatch:
    counts, slots, fresh = (np.array(each) for each in zip(*sequences, strict=True))
    ends, zeros = np.cumsum([0, *counts]), np.zeros(counts.sum(), np.int64)
    return StepBatch(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=zeros,
        cu_seqlens_q=ends,
        seq_lens=counts + 3,
        block_tables=np.zeros((len(counts), 1), np.int64),
        logits_rows=zeros[:1],
        slots=slots,
        fresh=fresh,
    )


class Layer:
    """The weights of a layer, its states, and the operators in float64."""

    def __init__(self, mode: Any, dtype: str, shape: RecurrentShape) -> None:
        self.backend, self.dtype, self.shape = make_backend(mode, dtype), dtype, shape
        heads, is_mamba = shape.num_heads, shape.kind == "mamba"
        self.conv = normal(dtype, shape.kernel_size * shape.num_channels, seed=1)
        self.weights = RecurrentWeights(
            shape=shape,
            conv=self.conv,
            conv_bias=normal(dtype, shape.num_channels, seed=2) if is_mamba else None,
            rates=np.exp(normal(dtype, heads, seed=3)).astype(self.conv.dtype),
            dt_bias=normal(dtype, heads, seed=4),
            skip=normal(dtype, heads, seed=5) if is_mamba else None,
            most=2.0,
        )
        self.states = self.backend.recurrent.new_state_cache(shape, 2, NUM_SLOTS)
        for index, array in enumerate((self.states.columns, self.states.states)):
            array[...] = normal("float32", *array.shape, seed=7 + index)
            array[:, 0] = np.nan  # fresh sequences ignore it
        self.before = self.states.columns.copy(), self.states.states.copy()

    def check_states(self, index: int, wanted: np.ndarray, slots: np.ndarray) -> None:
        """Compare the second layer's slots. Others are as before."""
        got, before = (self.states.columns, self.states.states)[index], self.before[index]
        used = slots[slots >= 0]
        check(got[1][used], wanted[used], "float32")
        others = np.setdiff1d(np.arange(NUM_SLOTS), used)
        np.testing.assert_array_equal(got[1][others], before[1][others])
        np.testing.assert_array_equal(got[0], before[0])


@pytest.mark.parametrize("sequences", [SEQUENCES, DECODES])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], shape_of("conv", 3, 0, 1, 0, 140)])
def test_convolutions(
    mode: str, dtype: str, shape: RecurrentShape, sequences: list[tuple[int, int, bool]]
):
    layer, batch = Layer(mode, dtype, shape), batch_of(sequences)
    is_gated = shape.kind == "conv"
    num_tokens, channels = int(batch.cu_seqlens_q[-1]), shape.num_channels
    x = normal(dtype, num_tokens, 3 * channels if is_gated else channels)
    bias = layer.weights.conv_bias
    kernel = wide(layer.conv).reshape(shape.kernel_size, -1)
    columns = wide(layer.states.columns[1])
    columns = np.concatenate([columns, 0 * columns[1:2]])  # padding has zeros: slot -1
    inputs = wide(x)
    if is_gated:
        b, c, inputs = np.split(wide(x), 3, axis=1)
        inputs = b * inputs
    of: Any = (batch.cu_seqlens_q, batch.slots, batch.fresh)
    sums = recurrent.causal_conv(inputs, kernel, None if bias is None else wide(bias), columns, of)
    got = layer.backend.recurrent.convolve(x, layer.weights, layer.states, 1, batch)
    check(got, sums * c if is_gated else activation.silu(sums), dtype)
    assert batch.slots is not None
    layer.check_states(0, columns, batch.slots)


@pytest.mark.parametrize("sequences", [SEQUENCES, DECODES])
@pytest.mark.parametrize("shape", SHAPES)
def test_recurrences(
    mode: str, dtype: str, shape: RecurrentShape, sequences: list[tuple[int, int, bool]]
):
    layer, batch = Layer(mode, dtype, shape), batch_of(sequences)
    w, num_tokens = layer.weights, int(batch.cu_seqlens_q[-1])
    is_delta = shape.kind == "delta"
    mixed = normal(dtype, num_tokens, shape.num_channels)
    small = normal(dtype, num_tokens, shape.num_heads * (2 if is_delta else 1), seed=1)
    rates, dt_bias = wide(w.rates), wide(w.dt_bias)
    if is_delta:
        of_tokens = recurrent.delta_inputs(wide(mixed), wide(small), shape, rates, dt_bias, w.most)
    else:
        of_tokens = recurrent.mamba_inputs(wide(mixed), wide(small), shape, rates, dt_bias)
    states, wanted = wide(layer.states.states[1]), []
    assert batch.slots is not None
    for row, (_, slot, is_fresh) in enumerate(sequences):
        begin, end = batch.cu_seqlens_q[row : row + 2]
        own = [each[begin:end] for each in of_tokens]
        state = 0 * states[1] if is_fresh or slot < 0 else states[slot]
        own += [] if is_delta else [wide(w.skip)]
        run: Any = recurrent.gated_delta if is_delta else recurrent.mamba
        wanted.append(run(*own, state))
        if slot >= 0:
            states[slot] = state
    got = layer.backend.recurrent.recur(mixed, small, w, layer.states, 1, batch)
    check(got, np.concatenate(wanted).reshape(num_tokens, -1), dtype)
    layer.check_states(1, states, batch.slots)


@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize(("size", "weight_size"), [(33, 33), (40, 120), (300, 300)])
def test_gated_norms(mode: str, dtype: str, size: int, weight_size: int, gates_first: bool):
    width = 3 * size
    x, gate = normal(dtype, 5, width), normal(dtype, 5, width, seed=1)
    gate[0, 0] = -100  # exp overflows
    weight = normal(dtype, weight_size, seed=2)
    weights: Any = SimpleNamespace(norm=weight, norm_size=size, eps=1e-5, gates_first=gates_first)
    got = make_backend(mode, dtype).recurrent.gated_norm(x, gate, weights)
    inputs = wide(x), wide(gate), wide(weight)
    wanted = recurrent.gated_norm(*inputs, size, 1e-5, gates_first=gates_first)
    check(got, wanted, dtype)


# Whole models.


def model_of(tmp_path: Path, name: str) -> Path:
    """Return a random model of a golden one's family, with heads of 16."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config |= {"num_attention_heads": 3, "num_key_value_heads": 1}
    rng = np.random.default_rng(3)
    tensors = {}
    for key, shape in expected_tensors(model_config_from_hf(config)).items():
        array = rng.normal(size=shape) / (shape[-1] ** 0.5 if len(shape) == 2 else 1)
        tensors[key] = array.astype(np.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


MODELS = ["lfm2_short_convs", "olmo_hybrid", "granite4_mamba", "qwen35_delta"]
PROMPTS = [{"prompt_token_ids": [*range(3, 3 + size)]} for size in (1, 7, 35, 12, 5)]
PARAMS = [
    SamplingParams(temperature=0, n=1, max_tokens=size, ignore_eos=True, logprobs=1)
    for size in (5, 6, 3, 7, 5)
]


def answers(model: Path, backend: str, **settings: Any) -> list[Any]:
    """Return tokens and the bits of the log-probabilities."""
    llm = LLM(str(model), backend=backend, skip_tokenizer_init=True, max_model_len=128, **settings)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(c.token_ids, c.cumulative_logprob) for each in outputs for c in each.outputs]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in MODELS[1:] else []) for n in MODELS]
)
def test_models_give_the_tokens_of_numpy(tmp_path: Path, device: str, name: str):
    """Steps of decodes are captured and padded. Some sequences are preempted or swapped."""
    model = GOLDEN / name if name == "qwen35_delta" else model_of(tmp_path, name)
    wanted = [tokens for tokens, _ in answers(model, "numpy", dtype="float64")]
    few: dict[str, Any] = {"num_blocks": 7, "block_size": 8, "max_num_seqs": 4}
    if name == "qwen35_delta":
        few |= {"preemption_mode": "swap", "swap_space": 1 << 20}  # the emulator fills it all
    for settings in ({}, few):
        got = answers(model, device, dtype="float32", **settings)
        assert [tokens for tokens, _ in got] == wanted


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_chunks_and_batches_change_no_bit(tmp_path: Path, device: str):
    model = model_of(tmp_path, "lfm2_short_convs")
    settings: dict[str, Any] = {"dtype": "float16", "batch_invariant": True, "block_size": 16}
    wanted = answers(model, device, max_num_seqs=1, enforce_eager=True, **settings)
    assert answers(model, device, **settings) == wanted
    assert answers(model, device, max_num_batched_tokens=16, **settings) == wanted
