"""Test steps as graphs: padded to shared sizes, captured, and replayed with other numbers.

On the emulator a graph is the list of its launches. Its results must equal those of eager steps bit
for bit, and its tokens those of the NumPy backend.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import on_device
import pytest
import tiny_models
from audit import captured_steps, steps_of
from emulated import QuickLauncher, launcher, needs_compiler
from test_kernels import cache_shape

from mie.base.arithmetic import ceil_div
from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops.backend import Backend, StepBatch
from mie.ops_gpu.batch import (
    ANY_LENGTH,
    MAX_CHUNK_TOKENS,
    Bucket,
    bucket_of,
    host_batch,
    padded,
    padded_decodes,
    padded_seqs,
    to_device,
)
from mie.ops_gpu.chip import EMULATED_CHIP
from mie.ops_gpu.cupy_backend import CupyBackend
from mie.ops_gpu.gemm import NumpyGemm
from mie.ops_gpu.load import load_emulated_backend
from mie.ops_gpu.queue import EmulatedQueue
from mie.ops_gpu.steps import Steps
from mie.sched.sequence import Request

WIDE = tiny_models.LLAMA | {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 64}
WIDE_WINDOW = WIDE | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
WIDE_WINDOW |= {"sliding_window": 20}
MODELS = {
    # name: config, block size, dtype
    "biases": (tiny_models.QWEN2, 4, "float32"),
    "window": (tiny_models.MISTRAL_WINDOW, 3, "float32"),
    "head norms": (tiny_models.QWEN3_TIED, 4, "float16"),
    "stream": (WIDE, 16, "float16"),
    "streamed window": (WIDE_WINDOW, 16, "float16"),
    "int4 cache": (WIDE_WINDOW, 16, "float32"),
    "large heads": (WIDE | {"num_key_value_heads": 1, "head_dim": 256}, 16, "float16"),
}
DEVICES = ["cupy-emulated", *(["cupy"] if on_device.IS_WANTED else [])]


class Run:
    """Run a random load through a backend that keeps its logits."""

    def __init__(
        self,
        model: Path,
        backend: str,
        seed: int,
        *,
        config: EngineConfig,
        dtype: str,
        quantization: str | None = None,
    ) -> None:
        self.logits: list[np.ndarray] = []
        self.num_seqs: list[int] = []
        self.requests: list[Request] = []
        settings = LoadSettings(
            engine=config, backend=backend, dtype=dtype, quantization=quantization
        )
        self.engine = load_engine(model, settings, wrap=self._wrap)
        rng = np.random.default_rng(seed)
        for step in range(40):
            if step < 12 and rng.random() < 0.5:
                self._add_request(rng)
            if not self.engine.has_work and step >= 12:
                break
            if self.engine.has_work:
                self.engine.step()
        self.tokens = [request.sequences[0].output_ids for request in self.requests]

    def _add_request(self, rng: np.random.Generator) -> None:
        params = SamplingParams(
            temperature=float(rng.choice([0, 0, 0.8])),
            seed=int(rng.integers(100)),
            max_tokens=int(rng.integers(1, 25)),
            ignore_eos=True,
        )
        prompt = rng.integers(4, 40, int(rng.integers(1, 30))).tolist()
        self.requests.append(self.engine.add_request(prompt, params))

    def _wrap(self, backend: Backend) -> Backend:
        self.backend: Any = backend
        run_step = backend.run_step

        def recorded(forward: Any, batch: StepBatch) -> Any:
            if (size := bucket_of(batch)) is not None:
                self.num_seqs.append(size.num_seqs)
            logits = run_step(forward, batch)
            self.logits.append(np.array(logits.get() if hasattr(logits, "get") else logits))
            return logits

        backend.run_step = recorded  # type: ignore[method-assign]
        return backend


@needs_compiler
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "stream" else [pytest.mark.slow]) for name in MODELS],
)
def test_graph_and_eager_are_equal_bit_for_bit(tmp_path: Path, device: str, name: str):
    config, block_size, dtype = MODELS[name]
    model = tiny_models.write_model(tmp_path, config, tiny_models.random_weights(config))
    settings: dict[str, Any] = {
        "kv_cache_dtype": "int4" if name == "int4 cache" else "auto",
        "num_blocks": 40,
        "block_size": block_size,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 12,
        "async_scheduling": False,
    }
    graphs = Run(model, device, 3, config=EngineConfig(**settings), dtype=dtype)
    eager_config = EngineConfig(**settings, enforce_eager=True)
    eager = Run(model, device, 3, config=eager_config, dtype=dtype)
    assert len(captured_steps(graphs.backend)) >= 3
    assert not captured_steps(eager.backend)
    assert len(graphs.logits) == len(eager.logits)
    for got, wanted in zip(graphs.logits, eager.logits, strict=True):
        assert got.tobytes() == wanted.tobytes()
    if dtype == "float32":
        numpy_run = Run(model, "numpy", 3, config=EngineConfig(**settings), dtype="float64")
        assert graphs.tokens == numpy_run.tokens


@needs_compiler
@pytest.mark.parametrize(
    ("name", "in_a_layer", "others"),
    [
        ("biases", 5, 3),
        pytest.param("stream", 5, 3, marks=pytest.mark.slow),
        pytest.param("streamed window", 5, 4, marks=pytest.mark.slow),
        pytest.param("head norms", 5, 3, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_few_rows_has_few_launches(
    tmp_path: Path, name: str, in_a_layer: int, others: int
):
    """The other three look up embeddings, take rows and compute logits. A window counts tiles."""
    config, block_size, dtype = MODELS[name]
    model = tiny_models.write_model(tmp_path, config, tiny_models.random_weights(config))
    engine_config = EngineConfig(num_blocks=40, block_size=block_size, async_scheduling=False)
    backends: list[Any] = []

    def wrap(backend: Backend) -> Backend:
        backends.append(backend)
        return backend

    engine = load_engine(
        model, LoadSettings(engine=engine_config, backend="cupy-emulated", dtype=dtype), wrap=wrap
    )
    for _ in range(3):
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        engine.add_request([5, 6, 7], params)
    while engine.has_work:
        engine.step()
    graphs = [step.launch.args[0] for step in captured_steps(backends[0]).values()]
    num_layers = config["num_hidden_layers"]
    assert graphs
    assert {*map(len, graphs)} == {in_a_layer * num_layers + others}


@needs_compiler
def test_the_least_recently_used_graph_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, block_size, dtype = MODELS["stream"]
    model = tiny_models.write_model(tmp_path, config, tiny_models.random_weights(config))
    settings: dict[str, Any] = {"num_blocks": 40, "block_size": block_size, "max_num_seqs": 12}
    settings |= {"max_num_batched_tokens": 24, "async_scheduling": False}
    captured: list[Bucket] = []
    capture = Steps._capture

    def counted(self: Steps, forward: Any, batch: Any) -> Any:
        if not len(batch.prefills):
            assert sum(not each.num_chunks for each in self._captured) <= 2
            captured.append(Bucket(len(batch.seq_lens), batch.max_len))
        return capture(self, forward, batch)

    monkeypatch.setattr(Steps, "_capture", counted)
    many = Run(model, "cupy-emulated", 3, config=EngineConfig(**settings), dtype=dtype)
    assert len(set(captured)) == len(captured) >= 3
    captured.clear()
    monkeypatch.setattr("mie.ops_gpu.steps.MAX_GRAPHS", 2)
    few = Run(model, "cupy-emulated", 3, config=EngineConfig(**settings), dtype=dtype)
    assert len(captured) >= 3
    kept = [each for each in captured_steps(few.backend) if not each.num_chunks]
    assert len(kept) == 2
    assert kept[-1] == Bucket(few.num_seqs[-1], ANY_LENGTH)
    assert [each.tobytes() for each in few.logits] == [each.tobytes() for each in many.logits]


SPLIT = {256, 512, 1024, 2048, 4096}


class Growing:
    """Decodes of one layer of attention, whose longest context grows and shrinks again."""

    LENGTHS = (5, 300, 600, 1500, 2100, 40)
    NUM_SEQS = (3, 9)  # in turn

    def __init__(
        self, dtype: str, window: int | None, *, enforce_eager: bool, batch_invariant: bool
    ) -> None:
        self.backend = load_emulated_backend(
            dtype, enforce_eager=enforce_eager, batch_invariant=batch_invariant
        )
        self.window = window
        shape = cache_shape(9 * 132, 16, 1, 64)
        rng = np.random.default_rng(0)
        self.cache = self.backend.new_kv_cache(shape)
        self.cache.layers[0][...] = rng.normal(size=self.cache.layers[0].shape)
        self.embedding = rng.normal(size=(20, 128)).astype(self.backend.dtype)
        self.upload = self.backend._queue.upload
        self.backend._queue.upload = self._counted  # type: ignore[method-assign]
        self.outputs: list[bytes] = []
        self.uploaded: list[int] = []
        self.used: list[int] = []
        self.run()

    def run(self) -> None:
        for length in self.LENGTHS:
            for num_seqs in self.NUM_SEQS:
                for _ in range(3):
                    self._step([length, *range(1, num_seqs)])

    def _counted(self, host: Any, device: Any) -> None:
        self.uploaded[-1] += host.size
        self.upload(host, device)

    def _step(self, lengths: list[int]) -> None:
        batch = decodes(lengths, ceil_div(max(lengths), 16))
        self.uploaded.append(0)
        self.used.append(padded_seqs(len(lengths)) * batch.block_tables.shape[1])
        self.outputs.append(self.backend.run_step(self.forward, batch).tobytes())

    def forward(self, batch: StepBatch) -> Any:
        q = self.backend.embed(batch.token_ids, self.embedding).reshape(-1, 2, 64)
        out = self.backend.paged_attention(q, self.cache, 0, batch, self.window)
        return out.reshape(-1, 128)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "batch_invariant", "max_lens", "window"),
    [
        pytest.param("float16", False, {ANY_LENGTH}, None, marks=pytest.mark.slow),
        pytest.param("float16", False, {ANY_LENGTH}, 70, marks=pytest.mark.slow),
        ("float16", True, {ANY_LENGTH}, None),
        pytest.param("float32", False, SPLIT, None, marks=pytest.mark.slow),
    ],
)
def test_longer_contexts_need_no_more_graphs(
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    batch_invariant: bool,
    max_lens: set[int],
    window: int | None,
):
    """Graphs follow the number of splits, and only the entries of the tables that are used are
    copied."""
    runs = [
        Growing(dtype, window, enforce_eager=is_eager, batch_invariant=batch_invariant)
        for is_eager in (False, True)
    ]
    assert runs[0].outputs == runs[1].outputs
    captured = captured_steps(runs[0].backend)
    assert set(captured) == {Bucket(n, length) for n in (4, 16) for length in max_lens}
    for num_integers, used in zip(runs[0].uploaded, runs[0].used, strict=True):
        assert used < num_integers <= used + 10 * 16 + 3

    # Rows that are too short grow, and the steps are captured again.
    monkeypatch.setattr("mie.ops_gpu.steps.TABLE_WIDTH", 40)
    narrow = Growing(dtype, window, enforce_eager=False, batch_invariant=batch_invariant)
    assert narrow.outputs == runs[0].outputs
    steps = steps_of(narrow.backend)
    assert steps._table_width == 256
    tables = {each.batch.block_tables.shape for each in captured_steps(narrow.backend).values()}
    assert tables == {(4, 256), (16, 256)}


@needs_compiler
@pytest.mark.parametrize(
    "name",
    ["biases", *(pytest.param(n, marks=pytest.mark.slow) for n in ("streamed window", "stream"))],
)
def test_padded_steps_access_only_their_own_memory(tmp_path: Path, name: str):
    """The checked build checks every access."""
    config, block_size, dtype = MODELS[name]
    queue = EmulatedQueue()
    checked = CupyBackend(
        "cupy-emulated",
        QuickLauncher(check=True, order="random", submit=queue.submit),
        NumpyGemm(queue.submit),
        dtype,
        EMULATED_CHIP,
        queue=queue,
    )
    engine = load_engine(
        tiny_models.write_model(tmp_path, config, tiny_models.random_weights(config)),
        LoadSettings(
            engine=EngineConfig(num_blocks=20, block_size=block_size, seed=1),
            backend="cupy-emulated",
        ),
        wrap=lambda backend: checked,
    )
    for number in range(3):
        engine.add_request([5, 6, 7 + number], SamplingParams(max_tokens=4 + number))
    while engine.has_work:
        engine.step()
    assert captured_steps(checked)


@needs_compiler
@pytest.mark.parametrize("device", DEVICES)
def test_the_overlapped_engine_gives_the_same_tokens(tmp_path: Path, device: str):
    """The step launched behind another reads its tokens on the device."""
    config = tiny_models.QWEN2
    model = tiny_models.write_model(tmp_path, config, tiny_models.random_weights(config))
    settings: dict[str, Any] = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 12}
    runs = [
        Run(model, device, 5, config=EngineConfig(**settings, async_scheduling=ahead), dtype=dtype)
        for ahead, device, dtype in ((True, device, "float32"), (False, "numpy", "float64"))
    ]
    assert runs[0].tokens == runs[1].tokens


@needs_compiler
def test_a_step_launched_ahead_keeps_unread_logits(tmp_path: Path):
    """Logits last until the next step, so a sequence's last token has log-probabilities, too."""
    config = tiny_models.QWEN2
    model = tiny_models.write_model(tmp_path, config, tiny_models.random_weights(config))
    logprobs = []
    for ahead in (True, False):
        settings = EngineConfig(num_blocks=40, block_size=4, async_scheduling=ahead)
        engine = load_engine(model, LoadSettings(engine=settings, backend="cupy-emulated"))
        few = engine.add_request([5, 6], SamplingParams(temperature=0, max_tokens=4, logprobs=1))
        engine.add_request([8, 9], SamplingParams(temperature=0, max_tokens=9))
        for _ in range(6):
            engine.step()
        assert few.is_finished
        logprobs.append([round(each.logprobs[0], 4) for each in few.sequences[0].logprobs])
    assert logprobs[0] == logprobs[1]


@needs_compiler
@pytest.mark.parametrize("mode", ["plain", "checked", *DEVICES[1:]])
@pytest.mark.parametrize("num_tokens", [1, 32, 300])
def test_a_step_reads_its_tokens_on_the_device(mode: str, num_tokens: int):
    drawn = np.arange(num_tokens, dtype=np.int32) * 7
    rows = np.random.default_rng(0).permutation(num_tokens).astype(np.int32)
    token_ids = np.zeros(num_tokens, np.int32)
    gpu: Any = on_device.device_launcher() if mode == "cupy" else launcher(mode == "checked")
    batch: Any = SimpleNamespace(token_ids=token_ids, drawn_rows=rows)
    Steps(gpu, EmulatedQueue(), enforce_eager=True)._take_tokens(drawn, batch)
    np.testing.assert_array_equal(token_ids, drawn[rows])


# Steps with chunks of prompts.


def with_chunks(lengths: list[int], chunks: list[tuple[int, int]]) -> StepBatch:
    """Return decodes of sequences of these lengths, and chunks of (tokens, length)."""
    counts = np.array([1] * len(lengths) + [count for count, _ in chunks])
    seq_lens = np.array(lengths + [length for _, length in chunks])
    ends, num_tokens = np.cumsum(counts), int(counts.sum())
    width = ceil_div(int(seq_lens.max()), 16)
    return StepBatch(
        token_ids=np.arange(num_tokens) % 20,
        positions=np.concatenate(
            [np.arange(n - c, n) for n, c in zip(seq_lens, counts, strict=True)]
        ),
        slot_mapping=np.arange(num_tokens),
        cu_seqlens_q=np.concatenate([[0], ends]),
        seq_lens=seq_lens,
        block_tables=np.arange(len(counts) * width).reshape(len(counts), width),
        logits_rows=ends - 1,
        num_decodes=len(lengths),
    )


class Chunked(Growing):
    """Steps of decodes and chunks, whose numbers and lengths differ from step to step."""

    STEPS = (
        ([300, 5], [(20, 20)]),
        ([70, 9], [(17, 600)]),  # the same size, with splits
        ([400, 2], [(12, 12), (9, 77)]),
        ([4], [(5, 5)]),  # few rows
        ([900], [(3, 40), (2, 2)]),
        ([], [(33, 700)]),
        ([], [(40, 40)]),
        ([7], [(70, 71), (3, 40)]),  # captured with the next one, whose chunks are shorter
        ([7], [(36, 36), (37, 90)]),
    )

    def run(self) -> None:
        self.kept = [set[Bucket]()]
        for _ in range(3):
            for lengths, chunks in self.STEPS:
                self.run_one(with_chunks(list(lengths), chunks))
                self.kept.append(set(captured_steps(self.backend)))

    def run_one(self, batch: StepBatch) -> None:
        self.uploaded.append(0)
        self.used.append(0)
        logits = self.backend.run_step(self.forward, batch)
        assert len(logits) == len(batch.logits_rows)
        self.outputs.append(logits.tobytes())
        alone = self.forward(to_device(np, batch))
        np.testing.assert_allclose(
            logits.astype(np.float64), alone.astype(np.float64), rtol=2e-3, atol=2e-3
        )

    def forward(self, batch: StepBatch) -> Any:
        return self.backend.take_rows(super().forward(batch), batch.logits_rows)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "batch_invariant", "window"),
    [
        ("float16", False, None),
        pytest.param("float16", False, 70, marks=pytest.mark.slow),
        pytest.param("float16", True, None, marks=pytest.mark.slow),
        pytest.param("float32", False, None, marks=pytest.mark.slow),
    ],
)
def test_steps_with_chunks_are_captured(dtype: str, batch_invariant: bool, window: int | None):
    """Replayed steps have the bits of eager ones, and the results of steps without padding.

    Decodes and chunks of other lengths replay the same graphs.
    """
    runs = [
        Chunked(dtype, window, enforce_eager=is_eager, batch_invariant=batch_invariant)
        for is_eager in (False, True)
    ]
    assert runs[0].outputs == runs[1].outputs
    assert not captured_steps(runs[1].backend)
    captured = captured_steps(runs[0].backend)
    sizes = {each[:1] + each[2:] for each in captured}
    assert sizes == {(4, 1, 28), (4, 4, 28), (4, 1, 12), (4, 4, 12), (0, 1, 64), (4, 4, 124)}


@needs_compiler
@pytest.mark.slow
def test_graphs_of_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """Sizes that were forgotten run eagerly before they are captured again."""
    monkeypatch.setattr("mie.ops_gpu.steps.MAX_CHUNK_GRAPHS", 2)
    run = Chunked("float16", None, enforce_eager=False, batch_invariant=False)
    assert max(map(len, run.kept)) == 2
    num_captured = sum(len(now - before) for before, now in itertools.pairwise(run.kept))
    assert 4 < num_captured <= 2 * len(run.STEPS)


def test_sizes_of_steps_with_chunks():
    batch = with_chunks([30] * 3, [(70, 95), (9, 9), (2, 60)])
    assert bucket_of(batch) == Bucket(4, 256, 4, 124)
    assert bucket_of(batch, follows_lengths=False) == Bucket(4, ANY_LENGTH, 4, 124)
    assert bucket_of(batch, most_tokens=100) == Bucket(4, 256, 4, 96)
    assert bucket_of(batch, most_tokens=85) == Bucket(4, 256, 4, 81)
    assert bucket_of(batch, most_tokens=84) is None
    assert bucket_of(with_chunks([], [(2100, 2100)])) is None
    assert bucket_of(with_chunks([9] * 16, [(2040, 2040)])) == Bucket(16, 2048, 1, 2048)
    assert bucket_of(with_chunks([], [(2, 2)] * 33)) is None
    assert bucket_of(with_chunks([9] * 17, [(2, 2)] * 5)) == Bucket(64, 256, 32, 64)
    assert bucket_of(with_chunks([9] * 2, [(20, 20)])) == Bucket(4, 256, 1, 28)
    assert bucket_of(with_chunks([9], [(3, 3)])) == Bucket(4, 256, 1, 4)
    many_logits = replace(batch, logits_rows=np.arange(40))
    assert bucket_of(many_logits) is None
    assert [padded_decodes(n) for n in (0, 1, 5, 17, 65, 129)] == [0, 4, 16, 64, 128, 256]
    for num_seqs in (0, 1, 8, 64):
        for num_tokens in range(1, MAX_CHUNK_TOKENS, 7):
            bucket = bucket_of(with_chunks([9] * num_seqs, [(num_tokens, num_tokens)]))
            assert bucket is not None
            assert bucket.num_chunk_tokens >= num_tokens
            assert bucket.num_tokens <= max(256, 1.5 * (bucket.num_seqs + num_tokens))


def test_padding_keeps_the_batch_and_writes_nowhere():
    batch = with_chunks([30, 4], [(5, 21), (2, 2)])
    wide = padded(batch, Bucket(4, 256, 4, 12))
    assert wide.cu_seqlens_q.tolist() == [0, 1, 2, 7, 9, 10, 11, 11, 11]
    assert wide.seq_lens.tolist() == [30, 4, 21, 2, 0, 0, 0, 0]
    assert wide.slot_mapping.tolist() == [*range(9)] + [-1] * 7
    assert wide.logits_rows.tolist() == [0, 1, 6, 8, 4, 5, 6, 7]
    assert wide.block_tables.shape == (8, 2)
    assert wide.block_tables[:4].tolist() == batch.block_tables.tolist()
    host = host_batch(wide, 256, 12)
    assert host.arrays["decodes"].tolist() == [0, 1, 4, 5]
    assert host.arrays["prefills"].tolist() == [2, 3, 6, 7]
    assert (host.max_prefill_queries, host.max_prefill_len) == (12, ANY_LENGTH)


# Sizes.


def decodes(lengths: list[int], table_width: int) -> StepBatch:
    count = len(lengths)
    tables = np.arange(count * table_width).reshape(count, table_width)
    return StepBatch(
        token_ids=np.arange(count) + 7,
        positions=np.array(lengths) - 1,
        slot_mapping=np.arange(count) + 100,
        cu_seqlens_q=np.arange(count + 1),
        seq_lens=np.array(lengths),
        block_tables=tables,
        logits_rows=np.arange(count),
    )


@needs_compiler
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_padded_sequences_get_zeros_or_no_output(head_dim: int, is_deterministic: bool):
    """The other sequences get the results that they get alone, with one split or several, streamed
    or not."""
    backend = load_emulated_backend("float16", batch_invariant=is_deterministic)
    rng = np.random.default_rng(0)
    cache = backend.new_kv_cache(cache_shape(80, 16, 1, head_dim))
    cache.layers[0][...] = rng.normal(size=cache.layers[0].shape)
    q = rng.normal(size=(8, 2, head_dim)).astype(np.float16)
    batch = decodes([3, 300, 65], 20)
    wide = padded(batch, Bucket(8, 512))
    outputs = [
        backend.paged_attention(q[: len(each.seq_lens)], cache, 0, each, None)
        for each in (batch, wide)
    ]
    assert outputs[0].tobytes() == outputs[1][:3].tobytes()
    assert head_dim == 64 or not outputs[1][3:].any()
