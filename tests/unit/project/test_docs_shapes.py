"""Check that the example of docs/shapes.md is a step of the engine."""

import re
from pathlib import Path

import numpy as np

from mie import EngineConfig, SamplingParams
from mie.engine.engine import Engine
from mie.engine.runner import ModelRunner
from mie.engine.watch.metrics import EngineMetrics
from mie.events import EventLog
from mie.load.backends import load_backend
from mie.load.engine import new_scheduler
from mie.memory.manager import KVCacheManager
from mie.ops.backend import Backend, KVCacheShape, StepBatch

PAGE = Path(__file__).parents[3] / "docs" / "shapes.md"
NUM_BLOCKS, BLOCK_SIZE, VOCAB = 8, 4, 50


def documented() -> dict[str, list[list[int | None]]]:
    """Return the rows of numbers by name from the page's table, with None for a dash."""
    [table] = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    rows: dict[str, list[list[int | None]]] = {}
    name = ""
    for line in table.splitlines():
        words = line.split()
        if words and re.fullmatch("[a-z_]+", words[0]):
            name = words.pop(0)
        numbers = [None if word == "-" else int(word) for word in words if word not in "ABC"]
        if numbers:
            rows.setdefault(name, []).append(numbers)
    return rows


class Recorder:
    """Replaces a decoder: records the batches, and uses only the shapes of tokens."""

    adapters = None

    def __init__(self) -> None:
        self.backend: Backend = load_backend("numpy")
        self.batches: list[StepBatch] = []

    def forward(self, batch: StepBatch, kv_cache: object, states: object) -> np.ndarray:
        self.batches.append(batch)
        return np.zeros((len(batch.logits_rows), VOCAB), np.float32)


def make_engine(recorder: Recorder) -> Engine:
    config = EngineConfig(
        block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_batched_tokens=8, max_num_seqs=4
    )
    log = EventLog(0)
    shape = KVCacheShape(
        num_layers=1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=2
    )
    runner = ModelRunner(
        recorder,  # type: ignore[arg-type]  # a decoder as far as the runner uses it
        recorder.backend.new_kv_cache(shape),
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_blocks_per_seq=NUM_BLOCKS,
    )
    scheduler = new_scheduler(config, NUM_BLOCKS, max_model_len=32, log=log)
    metrics = EngineMetrics(scheduler.max_model_len)
    return Engine(config, scheduler, runner, log, metrics, vocab_size=VOCAB, eos_token_ids=())


def hand_out_in_order(manager: KVCacheManager, order: list[int]) -> None:
    """Make the pool allocate free blocks in this order."""
    pool = manager.pool
    take = pool.take

    def take_next(after: int | None = None) -> int:
        return take(next(i for i in order if pool.refcount(i) == 0) - 1)

    pool.take = take_next  # type: ignore[method-assign]


def test_the_example_is_a_step_of_the_engine():
    recorder = Recorder()
    engine = make_engine(recorder)
    hand_out_in_order(engine.scheduler.manager, [7, 0, 3, 6, 1, 5, 2, 4])
    engine.add_request([20, 21, 22, 23], SamplingParams(max_tokens=1))  # leaves block 7 cached
    engine.step()
    assert not engine.has_work
    forced = SamplingParams(trace_decode_token_ids=[39])
    engine.add_request(list(range(30, 39)), forced, "C")
    while engine.stats.num_generated_tokens < 2:
        engine.step()
    engine.add_request([20, 21, 22, 23, 24, 25, 26], SamplingParams(), "B")
    engine.add_request([10, 11, 12, 13, 14, 15], SamplingParams(), "A")
    output = engine.step()

    batch, table = recorder.batches[-1], documented()
    assert set(output.request_ids) == {"C", "B"}
    for name in ("token_ids", "positions", "slot_mapping", "cu_seqlens_q", "seq_lens"):
        assert [getattr(batch, name).tolist()] == table[name], name
    assert [batch.logits_rows.tolist()] == table["logits_rows"]
    assert [[batch.num_decodes]] == table["num_decodes"]
    assert batch.block_tables.shape == (3, 3)
    for row, wanted in zip(batch.block_tables.tolist(), table["block_tables"], strict=True):
        assert [
            block if read is not None else None for block, read in zip(row, wanted, strict=True)
        ] == wanted
    needed = [-(-length // BLOCK_SIZE) for length in batch.seq_lens.tolist()]
    assert [sum(x is not None for x in row) for row in table["block_tables"]] == needed


def test_the_whole_table_of_the_page_is_read():
    others = {"drawn", "drawn_rows", "slots", "fresh", "num_groups", "group"}
    others |= {"adapters"}  # not in this step
    fields = vars(StepBatch)["__dataclass_fields__"].keys()
    assert documented().keys() == fields - others
