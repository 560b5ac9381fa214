"""Check whole steps of the `jit` backend against the plain operators, at sizes with edges.

One small model has a remainder everywhere: more inputs than one pass of a product takes, outputs
that do not fill a vector, heads that are padded, more rows than a tile, a window, and contexts of
several parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

from mie.ops.backend import KVCacheShape, StepBatch
from mie.ops.numpy_backend import NumpyBackend
from mie.ops.rope import rope_table
from mie.ops_jit import program as program_module
from mie.ops_jit.jit_backend import JitBackend
from mie.ops_jit.layout import NUM_TOKENS, PARTIALS
from mie.ops_jit.program import Program
from mie.ops_jit.step import StepHeader

D, F, V, HQ, HKV, DH = 520, 80, 73, 6, 2, 12
EPS = 1e-5
NUM_SLOTS = 1600
WINDOWS = (None, 20)


def weights(seed: int, dtype: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {
        "embed": (V, D),
        "qkv": ((HQ + 2 * HKV) * DH, D),
        "o": (D, HQ * DH),
        "gate_up": (2 * F, D),
        "down": (D, F),
        "head": (V, D),
    }
    found = {
        name: rng.normal(0, 2 / np.sqrt(shape[1]), shape).astype(np.float32).astype(dtype)
        for name, shape in shapes.items()
    }
    vectors = {"norm": D, "head_norm": DH, "qkv_bias": (HQ + 2 * HKV) * DH, "gate_up_bias": 2 * F}
    for name, size in vectors.items():
        found[name] = rng.normal(1 if "norm" in name else 0, 0.3, size).astype(np.float32)
    return found


class Model:
    """Two layers that share their weights, on a backend."""

    def __init__(self, backend: Any, given: dict[str, np.ndarray], block_size: int) -> None:
        self.backend = backend
        self.norm, self.head_norm = given["norm"], given["head_norm"]
        self.embedding = backend.load_embedding((V, D), [given["embed"]])
        self.weight = {
            name: backend.load_linear(given[name].shape, [given[name]], given.get(f"{name}_bias"))
            for name in ("qkv", "o", "gate_up", "down", "head")
        }
        self.rope = rope_table(10.0 ** -np.arange(DH / 2), 1.0, NUM_SLOTS, np.float32)
        shape = KVCacheShape(
            num_layers=len(WINDOWS),
            num_blocks=NUM_SLOTS // block_size,
            block_size=block_size,
            num_kv_heads=HKV,
            head_dim=DH,
        )
        self.cache = backend.new_kv_cache(shape)

    def forward(self, batch: StepBatch) -> Any:
        backend, weight = self.backend, self.weight
        x = backend.embed(batch.token_ids, self.embedding)
        num_tokens = len(x)
        for layer, window in enumerate(WINDOWS):
            h = backend.rms_norm(x, self.norm, EPS)
            qkv = backend.linear(h, weight["qkv"]).reshape(num_tokens, HQ + 2 * HKV, DH)
            backend.head_norm(qkv, 0, HQ + HKV, self.head_norm, EPS)
            q = backend.rope_write_kv(qkv, self.rope, self.cache, layer, batch)
            out = backend.paged_attention(q, self.cache, layer, batch, window)
            x = backend.linear(out.reshape(num_tokens, HQ * DH), weight["o"], x)
            x = backend.linear(
                backend.norm_gate_up(x, self.norm, EPS, weight["gate_up"]), weight["down"], x
            )
        x = backend.rms_norm(backend.take_rows(x, batch.logits_rows), self.norm, EPS)
        return backend.linear(x, weight["head"])

    def step(self, batch: StepBatch) -> np.ndarray:
        return np.array(self.backend.run_step(self.forward, batch))


@dataclass
class Sequences:
    """Sequences in blocks of a random order, whose steps are batches."""

    block_size: int
    lengths: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(5)
        blocks = self.rng.permutation(NUM_SLOTS // self.block_size)
        bounds = [len(blocks) * part // 16 for part in (12, 14, 15)]
        self.blocks = np.split(blocks, bounds)

    def batch(self, counts: Sequence[int]) -> StepBatch:
        """Return a step that computes this many tokens of each sequence."""
        sequences = [number for number, count in enumerate(counts) if count]
        positions, slots, tables = [], [], []
        width = max(len(self.blocks[number]) for number in sequences)
        for number in sequences:
            start = self.lengths[number]
            self.lengths[number] += counts[number]
            own, at = self.blocks[number], np.arange(start, self.lengths[number])
            positions.append(at)
            slots.append(own[at // self.block_size] * self.block_size + at % self.block_size)
            tables.append(np.pad(own, (0, width - len(own)), constant_values=10**6))
        ends = np.cumsum([0, *(counts[number] for number in sequences)])
        num_tokens = ends[-1]
        return StepBatch(
            token_ids=self.rng.integers(0, V, num_tokens),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(slots),
            cu_seqlens_q=ends,
            seq_lens=np.array([self.lengths[number] for number in sequences]),
            block_tables=np.stack(tables),
            logits_rows=np.unique(np.append(ends[1:] - 1, self.rng.integers(0, num_tokens, 3))),
        )


STEPS = [
    (0, 3, 0, 0),
    (0, 1, 0, 0),
    (600, 0, 0, 0),
    (505, 1, 17, 0),
    (1, 1, 1, 2),
    (1, 0, 1, 1),
    (1, 97, 1, 1),
    (1, 1, 49, 1),
    (1, 1, 1, 1),
]
"""Tokens of four sequences in each step. The first has a context of three parts."""
KINDS = {
    "float32": ("float32", "auto", 16, 2e-5),
    "16 bits and int8": (ml_dtypes.bfloat16, "int8", 5, 1e-3),
}
"""Dtypes of weights and cache, the block size, and the tolerance. An int8 value may round away."""


@pytest.fixture(scope="module", params=list(KINDS))
def logits(request: pytest.FixtureRequest) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Return each step's logits, of the plain operators and of `jit`, and the tolerance."""
    dtype, kv_cache_dtype, block_size, tolerance = KINDS[request.param]
    given = weights(0, dtype)
    plain = NumpyBackend("float32", kv_cache_dtype=kv_cache_dtype)
    own = JitBackend(num_threads=3, kv_cache_dtype=kv_cache_dtype)
    eager = JitBackend(num_threads=1, kv_cache_dtype=kv_cache_dtype, enforce_eager=True)
    wide = {name: array.astype(np.float32) for name, array in given.items()}
    models = (
        Model(plain, wide, block_size),
        Model(own, given, block_size),
        Model(eager, given, block_size),
        Model(own, weights(1, dtype), block_size),
        Model(eager, weights(1, dtype), block_size),
    )
    sequences = Sequences(block_size)
    expected, got = [], []
    for counts in STEPS:
        batch = sequences.batch(counts)
        reference, first, alone, other, other_alone = (model.step(batch) for model in models)
        expected.append(reference)
        got.append(first)
        np.testing.assert_array_equal(first, alone, err_msg=f"replayed and eager: {counts}")
        np.testing.assert_array_equal(other, other_alone, err_msg=f"the other model: {counts}")
    return expected, got, tolerance


def test_steps_equal_the_plain_operators(logits: tuple[list[Any], list[Any], float]) -> None:
    *both, tolerance = logits
    for counts, expected, got in zip(STEPS, *both, strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            got / scale, expected / scale, rtol=0, atol=tolerance, err_msg=str(counts)
        )


def test_a_step_that_was_interrupted_between_its_segments_can_be_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, batch = weights(0, np.float32), Sequences(16).batch((100, 0, 0, 0))
    model = Model(JitBackend(num_threads=2), given, 16)
    expected = model.step(batch)
    real, calls = model.backend._team.run, []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(model.backend._team, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.step(batch)
    np.testing.assert_array_equal(model.step(batch), expected)
    assert len(calls) >= 4


def test_the_partial_results_of_more_sequences_get_more_memory() -> None:
    header = StepHeader()
    for number in (1, 2, 9):
        batch = StepBatch(
            token_ids=np.zeros(number, int),
            positions=np.full(number, 1099),
            slot_mapping=np.arange(number),
            cu_seqlens_q=np.arange(number + 1),
            seq_lens=np.full(number, 1100),
            block_tables=np.zeros((number, 100), int),
            logits_rows=np.arange(number),
        )
        header.set_batch(batch, HQ, HKV, DH)
        assert header.words[PARTIALS] == header._partials.ctypes.data
        # Three parts, each with a state of 16 numbers and a padded head.
        assert header._partials.size >= number * 3 * HQ * (16 + 16)


def recorded() -> Program:
    program = Program(lambda name: 1, 1, 1)
    first, second = program.value(NUM_TOKENS, 8), program.value(NUM_TOKENS, 8)
    program.emit("kernel", NUM_TOKENS, 8, 1, first)
    program.emit("kernel", NUM_TOKENS, 8, 1, first, second)
    third = program.value(NUM_TOKENS, 8)
    program.emit("kernel", NUM_TOKENS, 8, 1, second, third)
    program.finish(third)
    return program


def test_a_buffer_is_used_again_after_the_last_instruction_that_reads_it() -> None:
    program = recorded()
    program.bind()
    first, second, third = program.words[0, 4], program.words[1, 5], program.words[2, 5]
    assert third == first
    assert second not in (first, 0)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_memory_that_could_not_be_provided_is_provided_by_the_next_step(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise error

    program = recorded()
    program.bind()
    with monkeypatch.context() as patch:
        patch.setattr(program_module, "zeros", refuse)
        program.lengths[NUM_TOKENS] = 1000
        with pytest.raises(error):
            program.bind()
    program.lengths[NUM_TOKENS] = 1
    program.bind()
    assert [len(each) >= 1 for each in program._memory] == [True, True]
    addresses = {each.ctypes.data for each in program._memory}
    assert {program.words[0, 4], program.words[1, 5]} == addresses
