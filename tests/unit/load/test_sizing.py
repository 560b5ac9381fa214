"""Test how much memory an engine takes, and the messages if that is too little."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_hybrids
import tiny_models

from mie import LLM, SamplingParams
from mie.checkpoint.config import model_config_from_hf
from mie.checkpoint.tensors import num_parameters
from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.load import sizing
from mie.load.engine import load_engine
from mie.load.fit import smaller_settings
from mie.load.settings import LoadSettings
from mie.load.sizing import MemoryPlan, plan_memory
from mie.model.config import ModelConfig
from mie.model.layout import grouped
from mie.ops.backend import Memory
from mie.ops.numpy_backend import NumpyBackend
from mie.ops_gpu.chip import device_memory

MODEL = model_config_from_hf(tiny_models.LLAMA)
BLOCK = 16 * 2 * 2 * 2 * 8 * 4
"""Bytes of a block: B, keys and values, L, Hkv, Dh, float32."""
CONTEXT = 256


class Backend(NumpyBackend):
    """A backend that reports a given amount of memory."""

    def __init__(self, available: int, *, is_shared: bool = True, dtype: str = "float32") -> None:
        super().__init__(dtype)
        self._memory = Memory(available_bytes=available, is_shared=is_shared)

    def memory(self) -> Memory:
        return self._memory


def needs(**settings: Any) -> int:
    """Return the bytes of weights and of a step."""
    plan = plan_memory(EngineConfig(num_blocks=1, **settings), MODEL, Backend(1 << 40))
    return plan.weight_bytes + plan.step_bytes


def planned(left: int, /, is_shared: bool = True, **settings: Any) -> MemoryPlan:
    """Return the plan if weights and a step leave a number of bytes."""
    backend = Backend(needs() + left, is_shared=is_shared)
    return checked(EngineConfig(**settings), backend)


def checked(config: EngineConfig, backend: Backend) -> MemoryPlan:
    """Return the plan, or raise its refusal, as `load_engine` does."""
    plan = plan_memory(config, MODEL, backend)
    if not plan.fits:
        raise plan.refusal(list(smaller_settings(config, MODEL, backend, plan)))
    return plan


# The amount that is used.


def test_a_quarter_of_shared_memory_and_all_of_a_gpus_is_used():
    assert planned(101 * BLOCK).num_blocks == 25
    assert planned(101 * BLOCK, is_shared=False).num_blocks == 101


def test_shared_memory_is_used_for_two_contexts_or_a_part_of_each_seats():
    """With memory to spare, the number of blocks follows from the settings alone."""
    context, of_a_seat = CONTEXT // 16, min(CONTEXT, 512) // 16
    for seats in (1, 2, 3, 64):
        plan = planned(1 << 40, max_num_seqs=seats)
        wanted = max(min(seats, 2) * context, seats * of_a_seat)
        assert plan.num_blocks == min(wanted, sizing.DEFAULT_KV_CACHE_BYTES // BLOCK)
        assert planned(1 << 40, is_shared=False, max_num_seqs=seats).num_blocks == seats * context
        assert planned(1 << 40, max_num_seqs=seats, num_blocks=7).num_blocks == 7


def test_one_line_says_why_the_cache_has_its_size():
    line = f"the KV cache has 7 blocks: {7 * BLOCK / 2**20:,.1f} MiB if all are used, and 112"
    assert planned(1 << 40, num_blocks=7).cache_line().startswith(line)
    for settings, reason in (
        ({"num_blocks": 7}, "as the settings say"),
        ({"max_num_seqs": 1}, "room for 1 × max_model_len"),
        ({"max_num_seqs": 2}, "room for 2 × max_model_len"),
        ({"max_num_seqs": 64}, "room for 64 sequences of at most 512 tokens"),
    ):
        assert planned(1 << 40, **settings).cache_line().endswith(f"({reason})")
    assert "a quarter of the memory that is left" in planned(101 * BLOCK).cache_line()
    assert "max_model_len" in planned(40 * BLOCK, max_model_len=CONTEXT).cache_line()


def test_the_table_shows_the_memory_that_is_left_to_answers():
    """A server holds the log-probabilities of answers to it, unless a setting replaces it."""
    plan = planned(801 * BLOCK, num_blocks=1)
    assert plan.answer_bytes == 100 * BLOCK
    row = rf"  log-probabilities of answers, at most +{100 * BLOCK / 2**20:,.1f} MiB"
    assert re.fullmatch(row, plan.table().splitlines()[-1])


def test_a_requested_length_is_kept_and_the_models_may_shrink():
    assert planned(40 * BLOCK, max_model_len=CONTEXT).num_blocks == CONTEXT // 16
    plan = planned(40 * BLOCK)
    assert plan.num_blocks == 10
    assert plan.num_positions == 160
    assert planned(BLOCK).num_blocks == 1


def test_the_swap_pool_comes_from_memory_that_the_cache_leaves(monkeypatch: pytest.MonkeyPatch):
    plan = planned(1000 * BLOCK, preemption_mode="swap")
    assert (plan.num_blocks, plan.num_host_blocks) == (250, 750 // 4)
    assert plan.fits
    assert "host memory for 187 swapped blocks" in plan.table()
    monkeypatch.setattr(sizing, "available_bytes", lambda: 80 * BLOCK)
    own = planned(1000 * BLOCK, is_shared=False, preemption_mode="swap")
    assert (own.num_blocks, own.num_host_blocks) == (1000, 20)
    assert "swap" not in own.table()
    asked = planned(BLOCK, is_shared=False, preemption_mode="swap", swap_space=7 * BLOCK + 1)
    assert asked.num_host_blocks == 7


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("num_blocks", [4, 9, 17])
def test_a_pool_shorter_than_the_context_is_announced_and_is_the_limit(
    tiny, caplog, family: str, num_blocks: int
):
    settings = {"block_size": 4, "max_model_len": 100, "max_num_batched_tokens": 16}
    caplog.set_level("WARNING")
    llm = LLM(
        str(tiny[family].directory),
        skip_tokenizer_init=True,
        backend="numpy",
        num_blocks=num_blocks,
        **settings,
    )
    limit = llm.llm_engine.engine.max_model_len
    assert limit < 100
    [line] = [record.getMessage() for record in caplog.records]
    assert f"have at most {limit} tokens" in line
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == limit - 3
    least = int(re.findall("num_blocks to at least ([0-9]+)", line)[0])
    for enough, number in ((True, least), (False, least - 1)):
        caplog.clear()
        config = EngineConfig(num_blocks=number, **settings)
        engine = load_engine(tiny[family].directory, LoadSettings(engine=config, backend="numpy"))
        assert (engine.max_model_len == 100) == enough
        assert bool(caplog.records) != enough


# Plans that do not fit.


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError, match="not enough memory") as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    ("setting", "asked", "fitting", "more"),
    [
        ("num_blocks", 16, 15, 16),
        ("kv_cache_memory_bytes", 16 * BLOCK + 5, 15 * BLOCK, 16 * BLOCK),
        ("max_model_len", CONTEXT, 15 * 16, 15 * 16 + 1),
    ],
)
def test_the_suggested_setting_fits(setting: str, asked: int, fitting: int, more: int):
    left = 15 * BLOCK + 9
    text = refusal(lambda: planned(left, **{setting: asked}))
    assert f"({setting}={fitting}" in text
    assert planned(left, **{setting: fitting}).fits
    refusal(lambda: planned(left, **{setting: more}))


HYBRID = model_config_from_hf(tiny_hybrids.QWEN35)
STATE = 2 * 4 * (4 * 6 * 8 + 3 * (2 * 2 * 6 + 4 * 8))
"""Bytes of a state: L, float32, H Dk Dv, and the columns of the convolution."""


def planned_states(left: int, **settings: Any) -> MemoryPlan:
    """Return a hybrid's plan if weights and a step leave a number of bytes of a GPU's memory."""
    config = EngineConfig(**settings)
    plan = plan_memory(config, HYBRID, Backend(1 << 40))
    available = plan.weight_bytes + plan.step_bytes + left
    plan = plan_memory(config, HYBRID, Backend(available, is_shared=False))
    assert plan.state_bytes == STATE
    assert plan.fits
    return plan


def test_blocks_and_states_share_one_budget() -> None:
    ample = planned_states(1 << 30, max_num_seqs=5)
    assert ample.num_states == 4 * 5
    assert ample.num_blocks == 5 * CONTEXT // 16
    assert planned_states(1 << 30, max_num_seqs=5, enable_prefix_caching=False).num_states == 5
    scarce = planned_states(20 * STATE)
    assert scarce.num_states == 10
    assert scarce.num_blocks == 10 * STATE // scarce.block_bytes
    asked = planned_states(20 * STATE, state_memory=3 * STATE + 1)
    assert asked.num_states == 3
    assert asked.num_blocks == 17 * STATE // asked.block_bytes


def test_states_that_do_not_fit_are_refused_with_a_size_that_does() -> None:
    asked = {"num_blocks": 1, "state_memory": 100 * STATE}
    plan = plan_memory(EngineConfig(**asked), HYBRID, Backend(1 << 40))
    backend = Backend(plan.weight_bytes + plan.step_bytes + plan.block_bytes + 9 * STATE)
    plan = plan_memory(EngineConfig(**asked), HYBRID, backend)
    assert not plan.fits
    named = [*smaller_settings(EngineConfig(**asked), HYBRID, backend, plan)]
    assert f"state_memory={9 * STATE}" in named
    fitting = EngineConfig(num_blocks=1, state_memory=9 * STATE)
    assert plan_memory(fitting, HYBRID, backend).fits


def test_a_swap_pool_has_room_for_states() -> None:
    pool = {"preemption_mode": "swap", "max_num_seqs": 4, "num_blocks": 9}
    plan = planned_states(1 << 30, swap_space=40 * STATE, **pool)
    assert plan.num_host_states == 4
    assert plan.num_host_blocks == 36 * STATE // plan.block_bytes
    plan = planned_states(1 << 30, swap_space=9 * STATE, **pool)
    assert (plan.num_host_states, plan.host_bytes <= 9 * STATE) == (2, True)
    with pytest.raises(ConfigError, match=f"swap_space is {STATE}; one block of 16 tokens and a"):
        planned_states(1 << 30, swap_space=STATE, **pool)


def test_the_table_shows_weights_that_do_not_fit():
    text = refusal(lambda: checked(EngineConfig(), Backend(1000)))
    assert text.endswith("(end other programs, or use a smaller model)")
    rows = dict(re.findall(r"^  (\S.*?) +([\d.,]+) MiB$", text, re.M))
    assert list(rows) == [
        "weights",
        "step of 2048 tokens (estimate)",
        "KV cache, 1 blocks of 16 tokens",
        "total",
        "available",
    ]
    assert float(rows["weights"]) == pytest.approx(4 * num_parameters(MODEL) / 2**20, abs=0.05)


@pytest.mark.parametrize(
    ("left", "fitting"), [(60, ["kv_cache_dtype=int8", "dtype=float16"]), (10, [])]
)
def test_a_data_type_that_does_not_suffice_is_not_named(tiny, monkeypatch, left, fitting):
    memory = Memory(available_bytes=needs() + left * BLOCK, is_shared=True)
    monkeypatch.setattr(NumpyBackend, "memory", lambda self: memory)
    config, directory = EngineConfig(num_blocks=100), tiny["llama"].directory
    text = refusal(lambda: load_engine(directory, LoadSettings(engine=config, backend="numpy")))
    assert f"(num_blocks={left}" in text
    assert re.findall(r"\w*dtype=\w+", text) == fitting


def test_a_failed_allocation_shows_the_table(tiny, monkeypatch):
    """No part of the cache remains after the failed attempt."""
    pieces: list[int] = []

    class Piece:
        def __init__(self) -> None:
            pieces.append(1)

        def __del__(self) -> None:
            pieces.pop()

    def new_kv_cache(self: NumpyBackend, shape: Any) -> list[Piece]:
        def allocated(layer: int) -> Piece:
            if layer == 3:
                raise MemoryError("no more")
            return Piece()

        return [allocated(layer) for layer in range(4)]

    monkeypatch.setattr(NumpyBackend, "new_kv_cache", new_kv_cache)
    with pytest.raises(ConfigError, match=r"(?s)could not get the memory.*weights.*\(lower num"):
        load_engine(
            tiny["llama"].directory,
            LoadSettings(engine=EngineConfig(num_blocks=4), backend="numpy"),
        )
    assert not pieces


# Available memory.


def cupy(*, free: int, total: int, pooled: int = 0, integrated: int = 0) -> Any:
    device = SimpleNamespace(attributes={"Integrated": integrated})
    return SimpleNamespace(
        cuda=SimpleNamespace(
            Device=lambda: device, runtime=SimpleNamespace(memGetInfo=lambda: (free, total))
        ),
        get_default_memory_pool=lambda: SimpleNamespace(free_bytes=lambda: pooled),
    )


def test_a_share_of_a_gpus_memory_is_left_free():
    memory = device_memory(cupy(free=800, total=1000, pooled=50), 0.9)
    assert memory == Memory(available_bytes=750, is_shared=False)
    assert device_memory(cupy(free=50, total=1000), 0.9).available_bytes == 0


def test_a_gpu_that_shares_memory_has_the_hosts_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mie.ops_gpu.chip.available_bytes", lambda: 5000)
    """A share of the whole is left free there, too."""
    for share, available in ((1.0, 5000), (0.9, 4200), (0.1, 0)):
        found = device_memory(cupy(free=1, total=8000, integrated=1), share)
        assert found == Memory(available_bytes=available, is_shared=True)


# Layers with windows.


def gemma(number: int, size: int, window: int) -> ModelConfig:
    """Return a tiny Gemma 3 with this many layers, of which every sixth sees all positions."""
    config = {key: value for key, value in tiny_models.GEMMA3.items() if key != "layer_types"}
    return model_config_from_hf(
        config
        | {"num_hidden_layers": number, "sliding_window": window, "sliding_window_pattern": 6}
        | {"max_position_embeddings": size}
    )


@pytest.mark.parametrize(
    ("number", "window", "most", "decoding"),
    [(18, 512, 8559, 6639), (26, 512, 12056, 8984), (34, 1024, 16030, 12190)],
)
def test_gemma_3_takes_a_quarter_of_the_whole_cache(number, window, most, decoding):
    model, backend = gemma(number, 32768, window), Backend(1 << 40)
    plan = plan_memory(EngineConfig(max_model_len=32768, max_num_seqs=1), model, backend)
    assert plan.window is not None
    whole = backend.kv_cache_bytes(sizing.cache_shape(model, 32768 // 16, 16))
    assert plan.num_blocks * plan.block_bytes * 4 <= whole
    assert plan.num_blocks * plan.layout.num_layers == most
    live = 32768 // 16 + plan.window.num_groups * plan.window.num_decoding
    assert live * plan.layout.num_layers == decoding
    assert plan.num_positions == 32768
    assert f"blocks of 16 tokens in {plan.layout.num_layers} layers" in plan.table()


def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_kind():
    for number in range(2, 40):
        model = gemma(number, 4096, 64)
        layout = grouped(model)
        assert len(set(layout.places)) == model.num_attention_layers
        assert all(place.number < layout.num_layers for place in layout.places)
        for place, window in zip(layout.places, model.layer_windows, strict=True):
            assert layout.window is None or (place.group == 0) == (window is None)
        lacking = layout.num_layers * layout.num_groups - number
        assert 0 <= lacking <= number / 6
        assert {place.group for place in layout.places} == {*range(layout.num_groups)}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_model_len": 64},  # no longer than a window and a chunk
        {"max_num_batched_tokens": 4096},  # a chunk is as long as the context
    ],
)
def test_groups_are_used_only_where_they_save_memory(settings: dict[str, int]):
    model = gemma(6, 4096, 64)
    plan = plan_memory(EngineConfig(**settings), model, Backend(1 << 40))  # type: ignore[arg-type]
    assert plan.window is None
    assert plan.layout.num_layers == 6
    assert plan_memory(EngineConfig(), model, Backend(1 << 40)).window is not None


def test_a_model_whose_layers_all_have_a_window_keeps_whole_blocks():
    model = model_config_from_hf(tiny_models.MISTRAL_WINDOW)
    config = EngineConfig(max_num_batched_tokens=8)
    assert plan_memory(config, model, Backend(1 << 40)).layout.num_groups == 1


def test_a_pool_without_a_block_for_each_group_is_refused():
    config = EngineConfig(num_blocks=5, max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match="raise num_blocks to at least 6"):
        plan_memory(config, gemma(6, 4096, 64), Backend(1 << 40))
