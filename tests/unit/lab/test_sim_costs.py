"""Test the cost model: its formula, the table of devices, and the runner that charges it."""

import math
import runpy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_hybrids
import tiny_models

from mie.checkpoint.config import model_config_from_hf
from mie.checkpoint.tensors import num_parameters
from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.events import read_log
from mie.events.replay import walk
from mie.lab import loads
from mie.lab.draws import Uniform
from mie.lab.sim.costs import Costs, StepWork, WallClock, window_pairs
from mie.lab.sim.devices import (
    DEVICES,
    SHAPES,
    Device,
    costs_on,
    find_device,
    find_shape,
    state_bytes,
)
from mie.lab.sim.driver import Bench, run_load
from mie.lab.sim.simulated import simulated, simulated_on
from mie.lab.workload import Answer, Text, Workload, WorkloadRequest
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.memory.layers.states import States
from mie.memory.layers.windows import Windows

SCRIPT = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "doc_tables.py"))
IDLE = StepWork(0, 0, 0, 0, 0, 0, 0)


def test_a_step_costs_the_sum_of_its_work():
    names = (
        *("step", "weights", "token", "logits", "pair", "context", "seq", "copy", "swap"),
        *("window_pair", "window_context", "state", "state_swap"),
    )
    costs = Costs(**{f"{name}_ps": 1000 * 10**i for i, name in enumerate(names)})
    work = StepWork(*range(2, 13))
    products = 2 * 100 + 3 * 1000
    rest = sum(i * 10**i for i in range(4, 13))
    assert costs.step_ns(work) == 1 + products + rest


def test_few_tokens_wait_for_the_weights_and_many_for_the_arithmetic():
    costs = Costs(weights_ps=10_000, token_ps=1_000)
    assert [costs.step_ns(IDLE._replace(num_tokens=n)) for n in (1, 10, 11, 30)] == [10, 10, 11, 30]
    costs = Costs(weights_ps=10_000, swap_ps=1_000)
    assert costs.step_ns(IDLE._replace(num_tokens=1)) == 10
    assert costs.step_ns(IDLE._replace(num_swapped=32)) == 32
    assert Costs().step_ns(IDLE) == 1


@pytest.mark.parametrize("values", [{"step_ps": -1}, {"token_ps": 0.5}, {"speed": 1}])
def test_wrong_costs_are_refused(values: dict):
    with pytest.raises(ConfigError, match=next(iter(values))):
        Costs(**values)


# The table.


@pytest.mark.parametrize(
    ("name", "published"), [("TinyLlama-1.1B", 1_100_048_384), ("Llama-3.1-8B", 8_030_261_248)]
)
def test_shapes_have_the_published_parameters(name: str, published: int):
    assert num_parameters(find_shape(name)) == published
    assert name in SHAPES


def test_costs_of_llama_on_an_h200_by_hand():
    """The reference uses 16 bits, 87 % of 4.8 TB/s and half of 989 TFLOP/s, in floats."""
    costs = costs_on(DEVICES["h200"], find_shape("Llama-3.1-8B"))
    head = 128_256 * 4096
    layers = 8_030_261_248 - 2 * head
    assert costs.weights_ps == pytest.approx((layers + head) * 2 / (0.87 * 4.8e12) * 1e12, rel=0.01)
    assert costs.token_ps == pytest.approx(2 * layers / (0.5 * 989e12) * 1e12, rel=0.01)
    assert costs.logits_ps == pytest.approx(2 * head / (0.5 * 989e12) * 1e12, rel=0.01)
    assert costs.pair_ps == pytest.approx(4 * 32 * 32 * 128 / (0.25 * 989e12) * 1e12, rel=0.01)
    assert costs.context_ps == pytest.approx(131_072 / (0.87 * 4.8e12) * 1e12, rel=0.01)
    assert costs.swap_ps == pytest.approx(131_072 / 50e9 * 1e12, rel=0.01)
    assert costs.step_ps == 1000 * (70_000 + 32 * 30_000)


def test_quantised_weights_take_their_bits():
    device, model = DEVICES["h200"], find_shape("Llama-3.1-8B")
    costs = costs_on(device, model, layer_bits=4.25, head_bits=8.25)
    head = 128_256 * 4096
    num_bytes = ((8_030_261_248 - 2 * head) * 4.25 + head * 8.25) / 8
    assert costs.weights_ps == pytest.approx(num_bytes / (0.87 * 4.8e12) * 1e12, rel=1e-6)
    assert replace(costs, weights_ps=0) == replace(costs_on(device, model), weights_ps=0)


@pytest.mark.parametrize(
    ("device", "most"), [("h200", 0.03), ("a100", 0.1), ("jetson-orin-nano", 0.17)]
)
def test_a_calibrated_device_predicts_the_published_steps(device: str, most: float):
    """No line of the fit is far off, and their errors cancel."""
    lines = [each for each in SCRIPT["errors"]() if each[0]["device"] == device]
    ratios = [ours / theirs for line, ours, theirs in lines if "is_fit" in line]
    assert max(abs(ratio - 1) for ratio in ratios) < most
    assert abs(math.log(math.prod(ratios)) / len(ratios)) < 0.03


def test_the_cache_has_as_many_blocks_as_fit_beside_the_weights():
    model, device = find_shape("TinyLlama-1.1B"), DEVICES["a10g"]
    left = 0.9 * 24e9 - 2 * num_parameters(model)
    manager = simulated_on(device, model, EngineConfig()).engine.scheduler.manager
    assert manager.num_blocks == int(left / (16 * 22_528))
    with pytest.raises(ConfigError, match="leaves no block"):
        simulated_on(DEVICES["jetson-orin-nano"], find_shape("Llama-3.1-8B"), EngineConfig())
    with pytest.raises(ConfigError, match="a10g"):
        find_device("a10")


def rate(device: Device) -> float:
    """Return the bytes a second that a device reads."""
    return device.bandwidth * device.bandwidth_percent / 100


def test_states_and_blocks_share_the_memory_beside_the_weights():
    """A state of Qwen3.5-0.8B has 16 heads of 128 x 128 and 3 columns of 6,144, in 18 layers."""
    model, device = find_shape("Qwen3.5-0.8B"), DEVICES["a10g"]
    state = 18 * 4 * (16 * 128 * 128 + 3 * 6144)
    assert state_bytes(model) == state
    costs = costs_on(device, model)
    assert costs.state_ps == pytest.approx(state / rate(device) * 1e12, rel=0.01)
    assert costs.state_swap_ps == pytest.approx(state / 25e9 * 1e12, rel=0.01)
    manager = simulated_on(device, model, EngineConfig(state_memory=50 * state)).engine.scheduler
    manager = manager.manager
    assert manager.part(States).num_states == 50
    left = 0.9 * 24e9 - 2 * num_parameters(model) - 50 * state
    assert manager.num_blocks == int(left / (16 * 6 * 2 * 2 * 256 * 2))


def test_windows_take_the_blocks_and_the_time_that_they_reach():
    """Of gpt-oss-20b, half of the 24 layers see 128 positions, and 4 of 32 experts are used."""
    model, device = find_shape("gpt-oss-20b"), DEVICES["a100"]
    costs = costs_on(device, model)
    assert costs.context_ps == costs.window_context_ps
    assert costs.context_ps == pytest.approx(12 * 2048 / rate(device) * 1e12, rel=0.01)
    assert costs.token_ps == pytest.approx(
        2 * 2.9e9 / (device.gemm_percent * 312e10) * 1e12, rel=0.1
    )
    bench = simulated_on(device, model, EngineConfig(max_num_batched_tokens=512))
    manager = bench.engine.scheduler.manager
    assert manager.part(Windows).window.size == 128
    assert manager.blocks_needed(8192) < 0.6 * 2 * 8192 / 16


@pytest.mark.parametrize("window", [1, 5, 30])
@pytest.mark.parametrize(("start", "end"), [(0, 3), (0, 9), (4, 12), (7, 8)])
def test_pairs_in_a_window_are_counted(start: int, end: int, window: int):
    assert window_pairs(start, end, window) == sum(min(p + 1, window) for p in range(start, end))


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="context is 2048"):
        simulated_on(
            DEVICES["a10g"], find_shape("TinyLlama-1.1B"), EngineConfig(max_model_len=4096)
        )
    with pytest.raises(ConfigError, match="give num_blocks"):
        simulated(Costs(), EngineConfig())
    with pytest.raises(ConfigError, match="no recurrent layers"):
        simulated(Costs(), EngineConfig(num_blocks=9, state_memory=1))
    with pytest.raises(ConfigError, match="no recurrent layers"):
        simulated_on(
            DEVICES["a10g"], find_shape("TinyLlama-1.1B"), EngineConfig(state_memory=1 << 20)
        )
    with pytest.raises(ConfigError, match="give num_host_blocks"):
        simulated(Costs(), EngineConfig(num_blocks=9, preemption_mode="swap"))


# The runner.

PRESSED = {
    "block_size": 4,
    "num_blocks": 24,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "watermark": 0.0,
}


def load() -> loads.Workload:
    return loads.independent(
        num_requests=12, input_len=Uniform(3, 30), output_len=Uniform(2, 20), prefix_len=6, seed=5
    )


def times_left_out(bench: Bench) -> list[dict]:
    """Return the work of a run's steps, without times."""
    result = run_load(bench, load())
    assert not any(record.error for record in result.records)
    assert result.num_preempted
    timed = ("start", "seconds", "schedule_seconds", "run_seconds", "update_seconds")
    return [{k: v for k, v in vars(step).items() if k not in timed} for step in result.steps]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_scheduler_does_the_same_as_with_a_model(tiny, mode: str):
    """All counts of every step equal those of the real runner and its arrays, with preemptions."""
    swap_space = 1 << 20 if mode == "swap" else None
    config = EngineConfig(**PRESSED, preemption_mode=mode, max_model_len=64, swap_space=swap_space)
    engine = load_engine(tiny["llama"].directory, LoadSettings(engine=config, dtype="float64"))
    real = Bench(engine=engine, clock=WallClock(), vocab_size=40)
    host = 200 if mode == "swap" else 0
    pretended = simulated(Costs(), config, num_host_blocks=host, vocab_size=40)
    assert times_left_out(pretended) == times_left_out(real)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    ("config", "num_blocks"), [(tiny_hybrids.QWEN35, 24), (tiny_models.GEMMA3, 46)]
)
def test_states_and_windows_are_those_of_the_real_engine(config, num_blocks, mode, tmp_path):
    """The memory of the plan makes the same moves, and the same load has the same steps."""
    model = model_config_from_hf(config | {"vocab_size": 40})
    given = EngineConfig(
        **(PRESSED | {"num_blocks": num_blocks}),
        preemption_mode=mode,
        swap_space=1 << 20 if mode == "swap" else None,
        max_model_len=64,
        state_memory=9 * 2 * state_bytes(model) or None,
    )
    engine = load_engine(
        tmp_path,
        LoadSettings(engine=given, backend="numpy", dtype="float64", load_format="dummy"),
        model=model,
    )
    manager = engine.scheduler.manager
    num_host = manager.host.pool.num_free
    states, windows = manager.part(States), manager.part(Windows)
    pretended = simulated(
        Costs(),
        replace(given, state_memory=None),
        num_host_blocks=num_host,
        num_states=(states.num_states, states.num_host_states) if states else (0, 0),
        window=windows.window if windows else None,
        window_size=model.layer_windows[0],
        vocab_size=40,
    )
    parts = pretended.engine.scheduler.manager.parts
    assert [*map(type, parts)] == [*map(type, manager.parts)] != []
    real = Bench(engine=engine, clock=WallClock(), vocab_size=40)
    assert times_left_out(pretended) == times_left_out(real)
    assert vars(pretended.engine.scheduler.manager.stats) == vars(manager.stats)


def test_a_state_costs_what_is_read_and_written():
    """A prompt of 10 tokens leaves a snapshot after 8, and its answer of 4 after 12.

    The next turn of 19 tokens begins with a copy of that, and leaves one after 16.
    """
    turn = Text(2, 5)
    requests = (
        WorkloadRequest(request_id="a", prompt=(Text(1, 10),), max_tokens=4),
        WorkloadRequest(
            request_id="b", prompt=(Text(1, 10), Answer("a"), turn), max_tokens=1, after="a"
        ),
    )
    bench = simulated(
        Costs(state_ps=1000), EngineConfig(block_size=4, num_blocks=99), num_states=(9, 0)
    )
    result = run_load(bench, Workload(name="states", requests=requests))
    spent = [round(step.run_seconds * 1e9) for step in result.steps]
    assert spent[:5] == [1, 2 + 2, 2, 2, 2 + 2]  # the chunks to 8 and 10, and three decodes
    assert spent[5:] == [2 + 2, 2 + 2]  # the chunks to 16 and 19


def works_of(path: Path) -> Iterator[Counter[str]]:
    """Yield the counts of `StepWork` for each step that computed something, from an event log."""
    work: Counter[str] = Counter()
    for summary, record, state in walk(read_log(path)):
        match record:
            case ("decode", rows):
                lengths = [state.sequences[state.rows[row]].num_computed + 1 for row in rows]
                work.update(num_tokens=len(rows), num_sampled=len(rows), num_seqs=len(rows))
                work.update(num_context=sum(lengths))
            case ("prefill", _, start, count, choices):
                work.update(num_tokens=count, num_sampled=len(choices), num_seqs=1)
                work.update(num_context=start + count)
                work.update(num_pairs=sum(range(start + 1, start + count + 1)))
            case ("step", _):
                assert summary is not None
                size = state.blocks.block_size
                work["num_copied"] = summary["num_copies"] * size
                work["num_swapped"] = (summary["num_exported"] + summary["num_imported"]) * size
                if work["num_tokens"]:
                    yield work
                work = Counter()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_log_of_a_run_has_the_work_that_was_charged(tmp_path, mode: str):
    """The runner counts the work of its plans, and reading the log counts it again.

    The log's records and states give the count. A cost of one picosecond for each kind tests each
    separately.
    """
    config = EngineConfig(**PRESSED, preemption_mode=mode)
    path = tmp_path / "run.jsonl"
    units = [field.removeprefix("num_") for field in StepWork._fields[:7]]
    names = ("token", "logits", "pair", "context", "seq", "copy", "swap")
    for name, field in zip(names, units, strict=True):
        with path.open("w") as file:
            bench = simulated(
                Costs(**{f"{name}_ps": 1000}),
                config,
                num_host_blocks=200 if mode == "swap" else 0,
                trace=file,
            )
            result = run_load(bench, load())
            bench.engine.log.close()
        counts = [work[f"num_{field}"] for work in works_of(path)]
        charged = [round(step.run_seconds * 1e9) for step in result.steps]
        assert charged == [max(1, count) for count in counts], name
        assert sum(counts) or (name, mode) == ("swap", "recompute")
