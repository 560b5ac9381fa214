"""Requests name adapters. Adapters are loaded into slots, and removed beside running requests."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import random_adapter, write_peft
from compiled import needs_numba
from tiny_models import LLAMA, random_weights, write_model

from mie import LLM, AsyncLLM, EngineConfig, LoRARequest, RequestOutput, SamplingParams
from mie.config.adapters import lora_modules_of
from mie.engine.watch.snapshot import scheduler_snapshot
from mie.errors import ConfigError, ModelError, RequestError
from mie.events import read_log
from mie.events.replay import at
from mie.load.backends import load_backend
from mie.load.opened import open_model
from mie.load.settings import LoadSettings
from mie.load.sizing import MemoryPlan, plan_memory

PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13]}
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
WEIGHTS = random_weights(LLAMA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_model(folder / "model", LLAMA, WEIGHTS)
    for number in (1, 2, 3):
        write_peft(folder / str(number), random_adapter(WEIGHTS, number, rank=number, size=3.0))
    return folder


def options_of(folder: Path, **options: Any) -> dict[str, Any]:
    sizes = {"num_blocks": 64, "block_size": 4, "backend": "numpy", "batch_invariant": True}
    model = {"model": folder / "model", "skip_tokenizer_init": True, "enable_lora": True}
    return {**model, **sizes, **options}


def llm_of(folder: Path, **options: Any) -> LLM:
    return LLM(**options_of(folder, **options))


def lora(folder: Path, number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, str(folder / str(number)))


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def generate(llm: LLM, *loras: LoRARequest | None) -> list[list[int]]:
    prompts = [PROMPT] * len(loras)
    return tokens_of(llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=loras))


def test_each_prompt_of_a_call_may_have_its_own_adapter(folder: Path) -> None:
    first, second = lora(folder, 1), lora(folder, 2)
    found = generate(llm_of(folder, max_loras=2), None, first, second, None)
    alone = [generate(llm_of(folder), each)[0] for each in (None, first, second)]
    assert found == [*alone, alone[0]]
    assert len({*map(tuple, alone)}) == 3
    assert alone[0] == generate(llm_of(folder, enable_lora=False), None)[0]


@needs_numba
def test_a_step_without_a_recording_has_the_adapters_of_its_tokens(folder: Path) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
    loras = [lora(folder, 1), None, lora(folder, 2), None]
    recorded, eager = (
        [
            output.prompt_logprobs
            for own in loras  # one after another, so that each step follows another adapter's
            for output in llm.generate(PROMPT, params, False, lora_request=own)
        ]
        for llm in (
            llm_of(folder, backend="jit", max_loras=2, enforce_eager=each) for each in (False, True)
        )
    )
    assert eager == recorded


def test_an_output_names_its_adapter(folder: Path) -> None:
    own = lora(folder, 1)
    outputs = llm_of(folder).generate([PROMPT] * 2, PARAMS, False, lora_request=[own, None])
    assert [output.lora_request for output in outputs] == [own, None]
    assert [RequestOutput.from_dict(output.as_dict()) for output in outputs] == outputs


def test_every_way_to_add_a_request_takes_an_adapter(folder: Path) -> None:
    llm, own = llm_of(folder), lora(folder, 1)
    [wanted] = generate(llm, own)
    found = [tokens_of(llm.generate(PROMPT, PARAMS, False, lora_request=own))[0]]
    llm.enqueue(PROMPT, PARAMS, lora_request=own)
    found += tokens_of(llm.wait_for_completion(use_tqdm=False))
    [*_, last] = llm.stream(PROMPT, PARAMS, lora_request=own)
    found += tokens_of([last])
    for add, rest in ((llm.add_request, ("1",)), (llm.llm_engine.add_request, ())):
        given = ("2", PROMPT, PARAMS) if not rest else (PROMPT, PARAMS, "1")
        add(*given, lora_request=own)  # type: ignore[arg-type]
        while llm.has_work:
            found += tokens_of([each for each in llm.step() if each.finished])
    assert found == [wanted] * 5


def test_an_async_llm_takes_an_adapter_beside_a_running_stream(folder: Path) -> None:
    [plain], [wanted] = generate(llm_of(folder), None), generate(llm_of(folder), lora(folder, 2))

    async def main() -> None:
        async with AsyncLLM(**options_of(folder)) as llm:
            long = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
            stream = llm.generate(PROMPT, long, "1")
            first = await anext(stream)
            assert await llm.add_lora(lora(folder, 2))
            async for output in llm.generate(PROMPT, PARAMS, "2", lora_request=lora(folder, 2)):
                last = output
            assert tokens_of([last]) == [wanted]
            assert await llm.list_loras() == {2}
            assert await llm.remove_lora(2)
            assert not await llm.remove_lora(2)
            async for output in stream:
                first = output
            assert first.outputs[0].token_ids[: len(plain)] == plain

    asyncio.run(main())


def test_adapters_do_not_share_cached_blocks(folder: Path) -> None:
    llm = llm_of(folder, max_loras=2)
    cached = [
        llm.generate(PROMPT, PARAMS, False, lora_request=each)[0].num_cached_tokens
        for each in (None, lora(folder, 1), lora(folder, 2), lora(folder, 1), None)
    ]
    assert cached == [0, 0, 0, 8, 8]


def test_a_callers_salt_separates_blocks_of_one_adapter(folder: Path) -> None:
    llm = llm_of(folder)
    cached = [
        llm.generate({**PROMPT, "cache_salt": salt}, PARAMS, False, lora_request=lora(folder, 1))
        for salt in ("a", "b", "a")
    ]
    assert [output.num_cached_tokens for [output] in cached] == [0, 0, 8]


def test_an_adapter_that_is_loaded_again_finds_its_blocks(folder: Path) -> None:
    llm = llm_of(folder)
    wanted = generate(llm, lora(folder, 1))
    assert llm.llm_engine.remove_lora(1)
    renamed = LoRARequest("another name", 7, str(folder / "1"))
    [output] = llm.generate(PROMPT, PARAMS, False, lora_request=renamed)
    assert [output.outputs[0].token_ids] == wanted
    assert output.num_cached_tokens == 8


def test_a_full_engine_refuses_another_adapter_and_goes_on(folder: Path) -> None:
    llm = llm_of(folder)
    wanted = generate(llm, lora(folder, 1))
    with pytest.raises(RequestError, match=r"max_loras is 1; loaded: adapter 1, .*raise max_loras"):
        generate(llm, lora(folder, 2))
    assert generate(llm, lora(folder, 1)) == wanted
    assert llm.llm_engine.list_loras() == {1}


def test_a_removed_adapter_serves_its_running_requests_and_then_its_slot_is_free(
    folder: Path,
) -> None:
    llm = llm_of(folder)
    [wanted] = generate(llm, lora(folder, 1))
    llm.add_request(PROMPT, PARAMS, "1", lora_request=lora(folder, 1))
    assert not llm.step()[0].finished
    assert llm.llm_engine.remove_lora(1)
    with pytest.raises(RequestError, match="loaded: none, and requests of a removed adapter keep"):
        llm.llm_engine.add_lora(lora(folder, 2))
    found: list[Any] = []
    while llm.has_work:
        found += [each for each in llm.step() if each.finished]
    assert tokens_of(found) == [wanted]
    assert llm.llm_engine.add_lora(lora(folder, 2))
    assert generate(llm, lora(folder, 2)) == generate(llm_of(folder), lora(folder, 2))


def test_a_request_that_was_prepared_before_its_adapter_was_removed_is_refused(
    folder: Path,
) -> None:
    llm = llm_of(folder)
    llm.llm_engine.add_lora(lora(folder, 1))
    prepared = llm.prepare(PROMPT, PARAMS, lora_request=lora(folder, 1))
    llm.llm_engine.remove_lora(1)
    llm.llm_engine.add_lora(lora(folder, 2))
    with pytest.raises(RequestError, match="adapter adapter 1 was removed"):
        llm.llm_engine.add(prepared)
    with pytest.raises(RequestError, match="adapter adapter 1 is not loaded"):
        llm.prepare(PROMPT, PARAMS, lora_request=lora(folder, 1))


@pytest.mark.parametrize(("name", "number"), [("adapter 1", 2), ("adapter 2", 1)])
def test_a_name_and_a_number_belong_to_one_adapter(folder: Path, name: str, number: int) -> None:
    llm = llm_of(folder, max_loras=2)
    llm.llm_engine.add_lora(lora(folder, 1))
    with pytest.raises(RequestError, match=r"and adapter 1 with number 1 of .* is loaded"):
        llm.llm_engine.add_lora(LoRARequest(name, number, str(folder / "2")))


def test_a_bad_adapter_changes_nothing(folder: Path, tmp_path: Path) -> None:
    llm = llm_of(folder)
    arrays = random_adapter(WEIGHTS, 1)
    next(iter(arrays.values()))[0][0, 0] = np.nan
    bad = LoRARequest("bad", 1, str(write_peft(tmp_path, arrays)))
    plain = generate(llm, None)
    with pytest.raises(ModelError, match="NaN"):
        generate(llm, None, bad)
    assert generate(llm, None) == plain
    assert llm.llm_engine.list_loras() == set()


def test_an_engine_without_slots_refuses_an_adapter(folder: Path) -> None:
    llm = llm_of(folder, enable_lora=False)
    with pytest.raises(RequestError, match="set enable_lora=True"):
        generate(llm, lora(folder, 1))
    with pytest.raises(RequestError, match="set enable_lora=True"):
        llm.prepare(PROMPT, PARAMS, lora_request=lora(folder, 1))


def test_modules_are_loaded_at_the_start_and_raise_the_number_of_slots(folder: Path) -> None:
    paths = {f"adapter {number}": str(folder / str(number)) for number in (1, 2, 3)}
    llm = llm_of(folder, lora_modules=paths)
    assert llm.engine.config.max_loras == 3
    assert llm.llm_engine.list_loras() == {1, 2, 3}
    assert generate(llm, lora(folder, 2)) == generate(llm_of(folder), lora(folder, 2))


@pytest.mark.parametrize(
    "backend", ["numpy", pytest.param("jit", marks=needs_numba), "cupy-emulated"]
)
def test_the_plan_counts_every_slot(folder: Path, backend: str) -> None:
    def plan(**options: Any) -> MemoryPlan:
        config = EngineConfig(**{"num_blocks": 8, "enable_lora": True, **options})
        model = open_model(folder / "model", LoadSettings(engine=config)).config
        return plan_memory(config, model, load_backend(backend, config=config))

    none, one = plan(enable_lora=False), plan(max_lora_rank=8)
    assert none.adapter_bytes == 0 < one.adapter_bytes
    assert plan(max_loras=3, max_lora_rank=8).adapter_bytes == 3 * one.adapter_bytes
    assert plan(max_lora_rank=16).adapter_bytes == 2 * one.adapter_bytes
    assert one.total_bytes - none.total_bytes > one.adapter_bytes  # a step takes more, too
    assert "slots of adapters, 1" in one.table()
    assert "slots" not in none.table()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": False, "lora_modules": {"a": "b"}}, "lora_modules needs enable_lora=True"),
        ({"lora_modules": 5}, "lora_modules must map names to paths; got 5"),
        ({"max_loras": 0}, "max_loras must be"),
        ({"max_lora_rank": 513}, "max_lora_rank must be"),
    ],
)
def test_a_wrong_setting_is_refused(folder: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm_of(folder, **{**options, "batch_invariant": False})


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, {}),
        ({"a": "b"}, {"a": "b"}),
        (["a=b", "c=d=e"], {"a": "b", "c": "d=e"}),
        ("a=b", {"a": "b"}),
        (['{"name": "a", "path": "b", "base_model_name": "m"}'], {"a": "b"}),
        ([{"name": "a", "path": "b"}], {"a": "b"}),
    ],
)
def test_modules_have_vllms_forms(value: Any, wanted: dict[str, str]) -> None:
    adapters = lora_modules_of(value)
    assert {name: each.lora_path for name, each in adapters.items()} == wanted
    assert [each.lora_name for each in adapters.values()] == [*wanted]
    assert [each.lora_int_id for each in adapters.values()] == [*range(1, len(wanted) + 1)]


@pytest.mark.parametrize(
    "value", [["a"], ["a=b", "a=c"], ["{"], [{"name": "a"}], [5], {"a": 5}, ["=b"], {"": "b"}]
)
def test_modules_of_another_form_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="lora_"):
        lora_modules_of(value)


@pytest.mark.parametrize("fields", [("", 1, "p"), ("a", 0, "p"), ("a", True, "p"), ("a", 1, "")])
def test_a_lora_request_checks_its_fields(fields: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="lora_"):
        LoRARequest(*fields)
    request = LoRARequest("a", 1, "p")
    assert (request.name, request.adapter_id, request.path) == ("a", 1, "p")


def test_the_event_log_of_two_adapters_replays_exactly(folder: Path, tmp_path: Path) -> None:
    """The pool is too small for all requests, and the second round finds cached blocks."""
    path = tmp_path / "trace.jsonl"
    snapshots: dict[int, Any] = {}
    with path.open("w") as file:
        llm = llm_of(folder, max_loras=2, num_blocks=12, trace=file)
        scheduler = llm.engine.scheduler
        llm.engine.observers.append(
            lambda stats: snapshots.update({stats.step: scheduler_snapshot(scheduler)})
        )
        for _ in range(2):
            generate(llm, lora(folder, 1), lora(folder, 2), None, lora(folder, 1), lora(folder, 2))
        llm.engine.log.close()
    segments = [*read_log(path)]
    for step, snapshot in snapshots.items():
        assert at(segments, step).snapshot() == snapshot
    records = [each for segment in segments for step in segment.steps for each in step]
    assert {"preempt", "hit"} <= {kind for kind, *_ in records}
    salts = {each[3] for each in records if each[0] == "seal"}
    adapters = {each.salt(None) for each in llm.engine.adapters}
    assert salts == {None, *adapters}
    assert len(adapters) == 2
