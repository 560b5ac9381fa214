"""Check that no bit of the compiled backend's results depends on the rest of the batch.

A scenario is a few sequences of random tokens. Computed alone, in one piece, by one thread and
operator by operator, they give the reference: the logits of every position. Then their tokens are
cut into steps at random: decodes and chunks mixed, in any order, in other blocks, recorded or not,
by 1 to 4 threads, in this process or a forked child. All logits must have the same bits.
"""

import itertools
import multiprocessing
import os
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tiny_models
from compiled import CACHES, QUICK_CACHES, jit_backend, needs_numba
from deadlines import PATIENCE, join
from numpy.typing import NDArray
from quantised_rows import quantised

from mie.checkpoint.changed import rounded
from mie.checkpoint.config import load_model_config
from mie.checkpoint.weights import Checkpoint, expected_tensors
from mie.config.engine import EngineConfig
from mie.load.backends import load_backend
from mie.load.sizing import cache_shape
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.ops.backend import StepBatch
from mie.ops.kv_cache import HALVES
from mie.ops.weights.quantised import Form, dequantise

pytestmark = needs_numba

Logits = NDArray[np.float32]

ODD = {
    "hidden_size": 100,
    "intermediate_size": 130,
    "head_dim": 20,
    "max_position_embeddings": 2048,
}
CONFIGS = {
    "llama": tiny_models.LLAMA,
    "odd sizes": tiny_models.LLAMA | ODD | {"num_attention_heads": 3, "num_key_value_heads": 1},
    "window": tiny_models.MISTRAL_WINDOW | ODD | {"sliding_window": 70},
    "biases": tiny_models.QWEN2 | ODD | {"num_attention_heads": 8, "head_dim": 64},
    "head norms": tiny_models.QWEN3_TIED | ODD | {"intermediate_size": 112},
    "wide group": tiny_models.LLAMA | ODD | {"num_attention_heads": 32, "num_key_value_heads": 1},
}
WEIGHTS = {"float32": None, **HALVES}
INT4, INT4_OF_16 = (Form(codes="int4", group=size, has_offsets=False) for size in (32, 16))
INT8 = Form(codes="int8", group=32, has_offsets=False)
FORMS = {
    "quantised": (INT4, INT8, None),
    "rounded activations": (INT4, INT8, None),
    "quantised in groups of 16": (INT4_OF_16, INT8, None),
    "groups of 16, rounded activations": (INT4_OF_16, INT8, None),
}
"""The forms of neighbouring matrices of a quantised model, and so of the parts of a fused one."""
QUICK_WEIGHTS = ("float32", "bfloat16", "quantised", "rounded activations")
QUICK_LONGEST = 650
"""Length of the longest sequence in `make test`."""
BLOCK_SIZES = (1, 3, 4, 8, 16, 24, 32)

seen: Counter[str] = Counter()


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder for each backend that has run it, which share nothing but the file."""

    directory: Any
    rounded_to: Any
    decoders: dict[int, Decoder]
    quantised_to: tuple[Form | None, ...] = ()
    activations: str = "float32"

    def forms(self, config: ModelConfig) -> dict[str, Form]:
        """Return the forms that matrices are rounded to, if the model is quantised."""
        matrices = [name for name, shape in expected_tensors(config).items() if len(shape) > 1]
        chosen = dict(zip(matrices, itertools.cycle(self.quantised_to), strict=False))
        return {name: form for name, form in chosen.items() if form}

    def on(self, backend: Any) -> Decoder:
        if id(backend) not in self.decoders:
            config = load_model_config(self.directory)
            with Checkpoint.open(self.directory, expected_tensors(config)) as checkpoint:
                weights = rounded(checkpoint, self.forms(config))
                self.decoders[id(backend)] = Decoder(
                    config, backend, weights, 1300, rounded_to=self.rounded_to
                )
        return self.decoders[id(backend)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Model]:
    root = tmp_path_factory.mktemp("models")
    found = {}
    for name, config in CONFIGS.items():
        weights = tiny_models.random_weights(config)
        directory = tiny_models.write_model(root / name, config, weights)
        for dtype, rounded_to in WEIGHTS.items():
            found[name, dtype] = Model(directory, rounded_to, {})
        for kind, forms in FORMS.items():
            activations = "int8" if "rounded" in kind else "float32"
            found[name, kind] = Model(directory, None, {}, forms, activations)
    return found


@dataclass(frozen=True, eq=False)
class Stepper:
    """A model on a backend with a cache, as the engine's runner has them."""

    decoder: Decoder
    cache: Any

    def forward(self, batch: StepBatch) -> Any:
        return self.decoder.forward(batch, self.cache)

    def step(self, batch: StepBatch) -> Logits:
        return np.array(self.decoder.backend.run_step(self.forward, batch))


def new_stepper(
    model: Model, stored: str, num_blocks: int, block_size: int, threads: int, is_eager: bool
) -> Stepper:
    from mie.ops_jit.memory import JitCache

    decoder = model.on(jit_backend(threads, is_eager, model.activations))
    cache = JitCache.new(cache_shape(decoder.config, num_blocks, block_size), CACHES[stored])
    if cache.scales is None:
        cache.elements.fill(np.nan)  # unwritten slots must have no effect
    else:
        cache.scales.fill(np.nan)
    return Stepper(decoder, cache)


@dataclass(frozen=True, eq=False)
class Sequences:
    """The tokens of a scenario, and where each sequence's positions are."""

    token_ids: list[NDArray[np.int64]]
    tables: NDArray[np.int64]
    block_size: int

    def batch(self, pieces: list[tuple[int, int, int]]) -> StepBatch:
        """Return a step of pieces, each (sequence, first position, end). All logits are wanted."""
        positions = [np.arange(first, end) for _, first, end in pieces]
        slots = [
            self.tables[row, each // self.block_size] * self.block_size + each % self.block_size
            for (row, _, _), each in zip(pieces, positions, strict=True)
        ]
        starts = np.array([0, *np.cumsum([len(each) for each in positions])])
        lengths = np.array([end for _, _, end in pieces])
        width = -(-int(lengths.max()) // self.block_size)
        return StepBatch(
            token_ids=np.concatenate([self.token_ids[row][a:b] for row, a, b in pieces]),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(slots),
            cu_seqlens_q=starts,
            seq_lens=lengths,
            block_tables=self.tables[[row for row, _, _ in pieces], :width],
            logits_rows=np.arange(starts[-1]),
        )


def sequences_in(
    rng: np.random.Generator, token_ids: list[NDArray[np.int64]], block_size: int
) -> tuple[Sequences, int]:
    """Return the sequences in random blocks, and the number of blocks."""
    needed = [-(-len(each) // block_size) for each in token_ids]
    num_blocks = sum(needed) + int(rng.integers(4))
    free = rng.permutation(num_blocks)
    tables = np.full((len(needed), max(needed)), -1)
    for row, (count, end) in enumerate(zip(needed, np.cumsum(needed), strict=True)):
        tables[row, :count] = free[end - count : end]
    return Sequences(token_ids, tables, block_size), num_blocks


def random_steps(
    rng: np.random.Generator, lengths: list[int], most: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield pieces of up to ``most`` tokens until all sequences are computed."""
    done = [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        waiting = [i for i, length in enumerate(lengths) if done[i] < length]
        chosen = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)]
        pieces = []
        for row in chosen.tolist():
            left = lengths[row] - done[row]
            # The last positions are decoded one by one, as those after a prompt are.
            is_decode = left <= 6 or rng.random() < 0.2
            count = 1 if is_decode else int(rng.integers(1, min(left - 5, most) + 1))
            pieces.append((row, done[row], done[row] + count))
            done[row] += count
        yield pieces


@dataclass(frozen=True, eq=False)
class Scenario:
    """Tokens of sequences, and the settings that must not change their logits."""

    rng: np.random.Generator
    token_ids: list[NDArray[np.int64]]
    model: Model
    stored: str
    block_size: int
    most: int


def draw(seed: int, models: dict[tuple[str, str], Model], longest: int) -> Scenario:
    """Return a scenario; `make test` compiles the kernels of few formats."""
    rng = np.random.default_rng(seed)
    weights, caches = [*WEIGHTS, *FORMS], list(CACHES)
    if longest == QUICK_LONGEST:
        weights, caches = [*QUICK_WEIGHTS], [*QUICK_CACHES]
    names = list(CONFIGS)
    lengths = rng.integers(1, rng.choice([9, 40, 140]) + 1, rng.integers(1, 7))
    if rng.random() < 0.15:
        lengths[0] = rng.integers(500, longest)
    return Scenario(
        rng=rng,
        token_ids=[rng.integers(0, 39, length) for length in lengths.tolist()],
        model=models[names[seed % len(names)], str(rng.choice(weights))],
        stored=str(rng.choice(caches)),
        block_size=int(rng.choice(BLOCK_SIZES)),
        most=int(rng.choice([1, 7, 60, 2000])),
    )


def alone(scenario: Scenario) -> list[Logits]:
    """Return the logits of each sequence by itself, in one piece."""
    result = []
    for token_ids in scenario.token_ids:
        own, num_blocks = sequences_in(scenario.rng, [token_ids], scenario.block_size)
        stepper = new_stepper(
            scenario.model, scenario.stored, num_blocks, scenario.block_size, 1, True
        )
        result.append(stepper.step(own.batch([(0, 0, len(token_ids))])))
    return result


def in_steps(scenario: Scenario, threads: int, is_eager: bool) -> list[Logits]:
    """Return the logits of each sequence, computed in random steps."""
    rng, lengths = scenario.rng, [len(each) for each in scenario.token_ids]
    together, num_blocks = sequences_in(rng, scenario.token_ids, scenario.block_size)
    stepper = new_stepper(
        scenario.model, scenario.stored, num_blocks, scenario.block_size, threads, is_eager
    )
    found: list[list[Logits]] = [[] for _ in lengths]
    for pieces in random_steps(rng, lengths, scenario.most):
        batch = together.batch(pieces)
        logits = stepper.step(batch)
        for (row, _, _), begin, end in zip(
            pieces, batch.cu_seqlens_q[:-1], batch.cu_seqlens_q[1:], strict=True
        ):
            found[row].append(logits[begin:end])
        seen["batches"] += 1
        seen["quantised"] += bool(scenario.model.quantised_to)
        seen["rounded"] += scenario.model.activations == "int8"
        seen["recorded"] += not is_eager
        counts = np.diff(batch.cu_seqlens_q)
        seen["decodes beside chunks"] += bool((counts == 1).any() and (counts > 1).any())
        seen["merged parts"] += bool(((counts == 1) & (batch.seq_lens > 512)).any())
    seen[f"{threads} threads"] += 1
    return [np.concatenate(each) for each in found]


def check(scenario: Scenario, wanted: list[Logits], threads: int, is_eager: bool) -> None:
    got = in_steps(scenario, threads, is_eager)
    for mine, theirs in zip(got, wanted, strict=True):
        assert np.isfinite(theirs).all()
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    ("num_scenarios", "num_batches"), [(4, 60), pytest.param(300, 10_000, marks=pytest.mark.slow)]
)
def test_no_bit_depends_on_the_batch(
    models: dict[tuple[str, str], Model], num_scenarios: int, num_batches: int
):
    seen.clear()
    for seed in range(num_scenarios):
        scenario = draw(seed, models, longest=QUICK_LONGEST if num_scenarios < 100 else 1200)
        wanted = alone(scenario)
        check(scenario, wanted, threads=seed % 4 + 1, is_eager=False)
        check(scenario, wanted, threads=scenario.rng.integers(1, 5).item(), is_eager=seed % 3 == 0)
    assert seen["batches"] >= num_batches, seen
    for what in ("recorded", "quantised", "rounded", "decodes beside chunks", "merged parts"):
        assert seen[what] >= num_batches // 50, seen
    assert all(seen[f"{threads} threads"] for threads in (1, 2, 3, 4)), seen


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("seed", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_forked_child_computes_the_same_bits(models: dict[tuple[str, str], Model], seed: int):
    """The child has the parent's program, whose threads it does not have."""
    scenario = draw(seed, models, longest=QUICK_LONGEST)
    wanted = alone(scenario)
    check(scenario, wanted, threads=3, is_eager=False)
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def child() -> None:
        for threads, is_eager in ((3, False), (3, True), (1, False), (3, False)):
            got = in_steps(scenario, threads, is_eager)
            sender.send([each.tobytes() for each in got])
        os._exit(0)

    process = fork.Process(target=child)
    process.start()
    sender.close()
    for _ in range(4):
        assert receiver.poll(PATIENCE)
        assert receiver.recv() == [each.tobytes() for each in wanted]
        check(scenario, wanted, threads=3, is_eager=False)
    join(process)
    assert process.exitcode == 0


# Single operators.


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(6, 20), (100, 130), (600, 70)])
def test_a_row_of_a_product_depends_on_no_other(dtype: str, num_inputs: int, num_outputs: int):
    rng = np.random.default_rng([num_inputs, num_outputs])
    matrix = rng.normal(size=(num_outputs, num_inputs)).astype(WEIGHTS[dtype] or np.float32)
    bias = rng.normal(size=num_outputs).astype(np.float32)
    x, residual = (
        rng.normal(size=(210, width)).astype(np.float32) for width in (num_inputs, num_outputs)
    )
    one = jit_backend(1)
    weight = one.load_linear(matrix.shape, [matrix], bias)
    wanted = np.concatenate(
        [one.linear(x[i : i + 1], weight, residual[i : i + 1]) for i in range(len(x))]
    )
    for threads in (1, 2, 3, 4):
        for count in (1, 2, 5, 6, 7, 11, 12, 13, 24, 95, 96, 97, 130, 210):
            rows = rng.permutation(len(x))[:count]
            got = jit_backend(threads).linear(x[rows], weight, residual[rows])
            assert got.tobytes() == wanted[rows].tobytes(), (threads, count)


@pytest.mark.parametrize("width", [6, 96, 100])
def test_a_row_of_a_norm_or_gate_depends_on_no_other(width: int):
    rng = np.random.default_rng(width)
    x = rng.normal(size=(60, 2 * width)).astype(np.float32)
    weight = rng.normal(size=2 * width).astype(np.float32)
    for name, arguments in (("rms_norm", (weight, 1e-5)), ("activate", ("silu",))):
        one = getattr(jit_backend(1), name)
        wanted = np.concatenate([one(x[i : i + 1], *arguments) for i in range(len(x))])
        for threads in (1, 3):
            for count in (1, 7, 8, 9, 60):
                rows = rng.permutation(len(x))[:count]
                got = getattr(jit_backend(threads), name)(x[rows], *arguments)
                assert got.tobytes() == wanted[rows].tobytes()


def chains(x: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return x times weights, each output a chain of multiply-adds that are rounded once.

    The product of two float32 numbers is exact in 64 bits. Only a sum close to the middle between
    two float32 numbers could be rounded twice, by chance 2**-39 of the time.
    """
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("long double has fewer than 64 bits here")
    wide, sums = x.astype(np.longdouble), np.zeros((len(x), len(weights)), np.float32)
    for k in range(x.shape[1]):
        sums = (wide[:, k, None] * weights[:, k] + sums).astype(np.float32)
    return sums


@pytest.mark.parametrize("cpu", ["haswell", ""])
@pytest.mark.parametrize(
    "form",
    [
        Form(codes="int4", group=32, has_offsets=True),
        None,
        *(
            pytest.param(Form(codes=codes, group=32, has_offsets=offsets), marks=pytest.mark.slow)
            for codes, offsets in (("int4", False), ("int8", False), ("int8", True))
        ),
    ],
    ids=str,
)
def test_an_output_is_one_chain_for_any_number_of_rows(
    form: Form | None, cpu: str, monkeypatch: pytest.MonkeyPatch
):
    if cpu and platform.machine() != "x86_64":
        pytest.skip("no such CPU")
    monkeypatch.setenv("MIE_CPU", cpu)
    num_outputs, num_inputs = 70, 550
    rng = np.random.default_rng(5)
    x = rng.normal(size=(17, num_inputs)).astype(np.float32)
    rows: Any = rng.normal(size=(num_outputs, num_inputs)).astype(HALVES["bfloat16"])
    if form is not None:
        rows = quantised(form, num_outputs, num_inputs)
    weights = rows.astype(np.float32) if form is None else dequantise(rows)
    wanted = chains(x, weights)
    for threads in (1, 2):
        backend = load_backend("jit", "auto", EngineConfig(num_threads=threads))
        matrix = backend.load_linear(rows.shape, [rows], None, [(num_outputs, form)])
        for count in range(1, 18):
            assert backend.linear(x[:count], matrix).tobytes() == wanted[:count].tobytes(), count
