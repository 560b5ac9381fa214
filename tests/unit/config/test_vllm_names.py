"""Every public name of vLLM's offline API runs, or is refused by name with the remedy.

tests/data/vllm_names.txt has the names, read from vLLM's wheel. Each one that mie has is used here.
"""

import asyncio
import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import mie
from mie import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TokensPrompt,
)
from mie.base.refusals import NEUTRAL, REFUSED, Neutral
from mie.base.stats.request import RequestMetrics
from mie.errors import ConfigError, RequestError, UnsupportedImportError, UnsupportedNameError

ROOT = Path(__file__).parents[3]
LINES = (ROOT / "tests/data/vllm_names.txt").read_text(encoding="utf-8").splitlines()
NAMES: Mapping[str, Mapping[str, str]] = {
    owner: {name: default for name, _, default in (each.partition("=") for each in names.split())}
    for owner, _, names in (line.partition(": ") for line in LINES if line[0] != "#")
}
"""The names of each owner: a module, a class, or ``Class.method``; with their defaults as JSON."""
MODULES = [owner for owner in NAMES if owner.startswith("vllm.")]
OWNERS = [owner for owner in NAMES if owner != "vllm" and owner not in MODULES]
PROMPTS = ("TextPrompt", "TokensPrompt")
OF_OBJECTS = {
    "LLM": ("llm_engine", "model_config", "runner_type", "supported_tasks"),
    "LLMEngine": ("model_config",),
}
"""Attributes that only an object has."""
WITH_ADAPTERS = (
    *("LLM.generate", "LLM.chat", "LLM.enqueue", "LLM.enqueue_chat"),
    *("LLM.beam_search", "LLMEngine.add_request", "AsyncLLM.generate"),
)
"""Methods that take adapters."""


def class_of(owner: str) -> Any:
    """Return mie's class with the name of vLLM's class."""
    name = owner.partition(".")[0]
    return RequestMetrics if name == "RequestMetrics" else getattr(mie, name)


def neutral(owner: str) -> Mapping[str, Neutral]:
    """Return the arguments without effect of a class or of a method."""
    class_name, _, method = owner.partition(".")
    if owner == "LLM.__init__":
        return NEUTRAL["EngineArgs"]
    found = dict(NEUTRAL.get(class_name if method in ("", "from_optional") else "calls", {}))
    if owner in WITH_ADAPTERS:
        del found["lora_request"]
    return found


def has(owner: str, name: str) -> bool:
    """Return whether mie's class or method has the name."""
    cls, method = class_of(owner), owner.partition(".")[2]
    if method == "from_optional":
        return name in inspect.signature(cls).parameters
    if method:
        takes = "chat" if method == "enqueue_chat" else method  # it passes on the options of chat
        return name in inspect.signature(getattr(cls, takes)).parameters
    own = {*getattr(cls, "__annotations__", ())} | {
        key for base in getattr(cls, "__orig_bases__", ()) for key in base.__annotations__
    }
    return hasattr(cls, name) or name in own or name in OF_OBJECTS.get(owner, ())


def kind(owner: str, name: str) -> str:
    """Return "neutral", "runs" or "refused"."""
    if name in neutral(owner):
        return "neutral"
    if has(owner, name):
        return "runs"
    assert name in REFUSED.get("prompts" if owner in PROMPTS else owner, ()), (
        f"mie does not have {name} of {owner}: add it to mie.base.vllm_names"
    )
    return "refused"


ROWS = [(owner, name) for owner in OWNERS for name in NAMES[owner]]


def rows(wanted: str, owners: Any = OWNERS) -> list[tuple[str, str]]:
    """Return the owners and names of a kind."""
    return [
        (owner, name) for owner, name in ROWS if owner in owners and kind(owner, name) == wanted
    ]


def running(owner: str) -> set[str]:
    return {name for _, name in rows("runs", [owner])}


ARGS = EngineArgs("bundled", num_blocks=32, max_model_len=64, scheduling_policy="priority")
SHORT = SamplingParams(max_tokens=3, temperature=0)
CHAT = [{"role": "user", "content": "Tell me a story"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_engine_args(ARGS)


@pytest.fixture(scope="module")
def output(llm: LLM) -> RequestOutput:
    """An output of a request that asked for everything."""
    params = SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1)
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    return output


def token_ids(outputs: Any) -> list[list[int]]:
    return [[*output.outputs[0].token_ids] for output in outputs]


# The lists.


def test_a_name_that_mie_does_not_have_is_noticed():
    with pytest.raises(AssertionError, match="mie does not have teleport of LLM"):
        kind("LLM", "teleport")


def test_the_page_has_each_remedy():
    page = " ".join((ROOT / "docs" / "vllm.md").read_text(encoding="utf-8").split())
    remedies = {each.remedy for owner in OWNERS for each in neutral(owner).values()}
    for owner in (*OWNERS, "LoadedModelConfig", "ModelFacts", "prompts", "mie", "modules"):
        remedies |= {*REFUSED.get(owner, {}).values()}
    missing = [remedy for remedy in remedies if remedy not in page]
    assert not missing, "docs/vllm.md lacks remedies of mie/base/vllm_names.py"


# Refused names.


@pytest.mark.parametrize(
    ("owner", "name"), rows("refused", [each for each in OWNERS if each not in PROMPTS])
)
def test_a_refused_name_says_what_to_do_instead(owner: str, name: str, llm: LLM):
    cls = class_of(owner)
    for subject in (cls, {"LLM": llm, "LLMEngine": llm.llm_engine}.get(owner, cls)):
        assert not hasattr(subject, name)
        with pytest.raises(UnsupportedNameError) as caught:
            getattr(subject, name)
        assert f"has no {name}: {REFUSED[owner][name]}" in str(caught.value)


@pytest.mark.parametrize(("owner", "name"), rows("refused", PROMPTS))
def test_a_refused_key_of_a_prompt_is_accepted_as_none(owner: str, name: str, llm: LLM):
    prompt = {"prompt_token_ids": [1, 2], name: None}
    assert llm.prepare(prompt, SHORT).token_ids == [1, 2]
    with pytest.raises(RequestError, match=f"{name} is not supported: mie generates text"):
        llm.prepare({**prompt, name: [1]}, SHORT)


@pytest.mark.parametrize("name", NAMES["vllm"])
def test_a_name_of_vllm_itself_is_loaded_or_refused_with_the_remedy(name: str):
    if name in dir(mie):
        assert getattr(mie, name) is not None
        return
    with pytest.raises(UnsupportedImportError) as caught:
        exec(f"from mie import {name}")
    assert f"mie has no {name}: {REFUSED['mie'][name]}" in str(caught.value)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_vllm_is_refused_with_the_names_to_import_from_mie(module: str):
    ours = module.replace("vllm", "mie", 1)
    with pytest.raises(UnsupportedImportError, match="mie has no module") as caught:
        importlib.import_module(ours)
    named = re.findall(r"import (.*) from mie$", str(caught.value))
    for name in re.findall(r"[A-Z]\w+", "".join(named)):
        assert name in NAMES[module]
        assert name in mie.__all__
    own = {*NAMES[module]} & {*mie.__all__}
    assert all(name in named[0] for name in own), "the remedy lacks a name"
    with pytest.raises(UnsupportedImportError):
        getattr(mie, ours.split(".")[1])


def test_the_closest_name_of_mie_is_in_the_refusal(llm: LLM):
    with pytest.raises(UnsupportedNameError, match="the closest name is 'num_layers'"):
        _ = llm.model_config.get_num_layers  # type: ignore[attr-defined]  # it is refused
    with pytest.raises(UnsupportedNameError, match="the closest name is 'logprobs'"):
        _ = SHORT.num_logprobs  # type: ignore[attr-defined]  # it is refused


def test_a_name_that_vllm_lacks_too_is_an_ordinary_error(llm: LLM):
    with pytest.raises(AttributeError, match="module 'mie' has no attribute 'Nope'"):
        _ = mie.Nope
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = llm.nope  # type: ignore[attr-defined]  # it does not exist
    assert not hasattr(mie, "nope")


# Names that are accepted at some values.


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(ARGS)
    yield llm
    llm.shutdown()


def accepts(owner: str, name: str, value: Any, llm: LLM, async_llm: AsyncLLM) -> None:
    """Use an argument."""
    class_name, _, method = owner.partition(".")
    given = {name: value}
    if method in ("", "__init__", "from_optional"):
        cls = EngineArgs if class_name in ("LLM", "AsyncEngineArgs") else getattr(mie, class_name)
        own = {"beam_width": 1, "max_tokens": 1} if cls is BeamSearchParams else {}
        (cls.from_optional if method == "from_optional" else cls)(**own, **given)
    elif class_name == "AsyncLLM":
        asyncio.run(async_call(async_llm, method, given))
    else:
        CALLS[owner](llm, given)


async def async_call(llm: AsyncLLM, method: str, given: dict[str, Any]) -> Any:
    """Call a method of `AsyncLLM`."""
    if method == "from_engine_args":
        AsyncLLM.from_engine_args(ARGS, **given).shutdown()
        return None
    if method == "generate":
        own = {"sampling_params": SHORT, "request_id": "1", "prompt": "Once"}
        return [each async for each in llm.generate(**{**own, **given})][-1]
    own = {"abort": {"request_id": "7"}}.get(method, {})
    if method == "shutdown":
        llm = AsyncLLM.from_engine_args(ARGS)
    done = getattr(llm, method)(**own, **given)
    return await done if inspect.isawaitable(done) else done


def finish(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return [output for output in outputs if output.finished]


def add(llm: LLM, given: dict[str, Any]) -> list[RequestOutput]:
    llm.llm_engine.add_request(**{"request_id": "7", "prompt": "Once", "params": SHORT, **given})
    return finish(llm.llm_engine)


def enqueue(llm: LLM, given: dict[str, Any]) -> list[RequestOutput]:
    ids = llm.enqueue(**{"prompts": "Once", "sampling_params": SHORT, **given})
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    return outputs


def enqueue_chat(llm: LLM, given: dict[str, Any]) -> list[RequestOutput]:
    llm.enqueue_chat(**{"messages": CHAT, "sampling_params": SHORT, **given})
    return llm.wait_for_completion(use_tqdm=False)


QUIET = {"use_tqdm": False}
CALLS: dict[str, Callable[[LLM, dict[str, Any]], Any]] = {
    "LLM.generate": lambda llm, given: llm.generate(
        **{"prompts": "Once", "sampling_params": SHORT, **QUIET, **given}
    ),
    "LLM.chat": lambda llm, given: llm.chat(
        **{"messages": CHAT, "sampling_params": SHORT, **QUIET, **given}
    ),
    "LLM.beam_search": lambda llm, given: llm.beam_search(
        **{"prompts": "Once", "params": BeamSearchParams(beam_width=2, max_tokens=2), **given}
    ),
    "LLM.enqueue": enqueue,
    "LLM.enqueue_chat": enqueue_chat,
    "LLM.wait_for_completion": lambda llm, given: (
        llm.enqueue("Once", SHORT) and llm.wait_for_completion(**QUIET | given)
    ),
    "LLM.from_engine_args": lambda llm, given: LLM.from_engine_args(**given),
    "LLM.get_world_size": lambda llm, given: llm.get_world_size(**given),
    "LLM.reset_prefix_cache": lambda llm, given: llm.reset_prefix_cache(**given),
    "LLMEngine.from_engine_args": lambda llm, given: LLMEngine.from_engine_args(
        **{"engine_args": ARGS, **given}
    ),
    "LLMEngine.add_request": add,
    "LLMEngine.abort_request": lambda llm, given: llm.llm_engine.abort_request(
        **{"request_ids": [], **given}
    ),
    "LLMEngine.reset_prefix_cache": lambda llm, given: llm.llm_engine.reset_prefix_cache(**given),
}


@pytest.mark.parametrize(("owner", "name"), rows("neutral"))
def test_a_neutral_value_is_accepted_and_another_is_refused(owner, name, llm, async_llm):
    found = neutral(owner)[name]
    for value in found.values:
        accepts(owner, name, value, llm, async_llm)
    if found.may_be_any:
        accepts(owner, name, "something else", llm, async_llm)
        return
    with pytest.raises(ConfigError) as caught:
        accepts(owner, name, "something else", llm, async_llm)
    assert f"{name} is not supported: {found.remedy} (leave it at " in str(caught.value)


def test_no_value_but_those_listed_is_neutral():
    for value in (0, 2, True, None, "1", [1]):
        with pytest.raises(ConfigError, match="pipeline_parallel_size is not supported: mie comp"):
            EngineArgs(pipeline_parallel_size=value)  # type: ignore[arg-type]  # as a caller might
    given: Any = {"cpu_offload_gb": 0.0, "offload_params": set()}
    assert EngineArgs(**given) == EngineArgs()


@pytest.mark.parametrize("owner", ["EngineArgs", "SamplingParams", "BeamSearchParams"])
def test_vllms_own_defaults_are_accepted(owner: str):
    given = {
        name: json.loads(default)
        for name, default in NAMES[owner].items()
        if default and kind(owner, name) != "refused"
    }
    own = {"beam_width": 1, "max_tokens": 1} if owner == "BeamSearchParams" else {}
    getattr(mie, owner)(**own, **given)


OF_METHODS = [(owner, name) for owner in CALLS for name in sorted(running(owner))]


VALUES: dict[str, Any] = {
    "prompts": ["Once", TokensPrompt(prompt_token_ids=[1, 2])],
    "prompt": "Once",
    "messages": [CHAT, CHAT],
    "sampling_params": SamplingParams(max_tokens=2, temperature=0),
    "use_tqdm": False,
    "priority": 1,
    "chat_template": "{{ messages[0].content }}",
    "chat_template_content_format": "string",
    "add_generation_prompt": False,
    "continue_final_message": False,
    "tools": None,
    "chat_template_kwargs": {},
    "lora_request": None,
    "concurrency_limit": 1,
    "output_type": RequestOutput,
    "include_dp": False,
    "engine_args": ARGS,
    "request_id": "8",
    "request_ids": ["8"],
    "params": SamplingParams(max_tokens=2, temperature=0),
}


@pytest.mark.parametrize(("owner", "name"), OF_METHODS)
def test_a_parameter_of_a_method_is_accepted(owner: str, name: str, llm: LLM):
    value = VALUES[name]
    if (owner, name) == ("LLM.beam_search", "params"):
        value = BeamSearchParams(beam_width=1, max_tokens=1)
    CALLS[owner](llm, {name: value})


def test_every_method_with_parameters_is_called():
    methods = {o for o in OWNERS if "." in o}
    constructors = {"LLM.__init__", "SamplingParams.from_optional"}
    called = {*CALLS, *(o for o in methods if o.startswith("AsyncLLM."))}
    assert methods - constructors == called


# Names that run.


def test_an_llm_has_vllms_members(llm: LLM, output: RequestOutput):
    params, chat = SHORT, CHAT
    [whole] = llm.generate("Once upon a time", params, use_tqdm=False)
    results: dict[str, Any] = {
        "beam_search": llm.beam_search(
            "Once", BeamSearchParams(beam_width=2, max_tokens=2), priority=1
        )[0]
        .sequences[0]
        .text,
        "chat": llm.chat(chat, params, use_tqdm=False, priority=2)[0].outputs[0].text,
        "enqueue": llm.enqueue(["Once upon a time", [1, 2]], params, priority=[2, 1]),
        "enqueue_chat": llm.enqueue_chat(chat, params),
        "from_engine_args": ARGS,
        "generate": whole,
        "get_default_sampling_params": llm.get_default_sampling_params().temperature,
        "get_metrics": llm.get_metrics(),
        "get_tokenizer": llm.get_tokenizer().encode("Once"),
        "get_world_size": llm.get_world_size(include_dp=False),
        "llm_engine": llm.llm_engine.get_supported_tasks(),
        "model_config": llm.model_config.vocab_size,
        "runner_type": llm.runner_type == "generate",
        "supported_tasks": llm.supported_tasks == ("generate",),
        "wait_for_completion": llm.wait_for_completion(use_tqdm=False),
        "reset_prefix_cache": llm.reset_prefix_cache(),
    }
    assert results.keys() == running("LLM")
    assert all(results.values())
    waited = results["wait_for_completion"]
    assert [each.request_id for each in waited] == results["enqueue"] + results["enqueue_chat"]
    assert token_ids(waited)[0] == token_ids([whole])[0]
    assert waited[2].outputs[0].text == results["chat"]
    with pytest.raises(ConfigError, match="output_type must be RequestOutput; got <class 'int'>"):
        llm.wait_for_completion(int)
    assert llm.wait_for_completion() == []


def test_an_engine_has_vllms_members(llm: LLM):
    engine, ids = llm.llm_engine, llm.get_tokenizer().encode("Once upon a time")
    [expected] = llm.generate([ids], SHORT, use_tqdm=False)
    assert not engine.has_unfinished_requests()
    assert engine.add_request("1", {"prompt_token_ids": ids}, SHORT, priority=1) == "1"
    engine.add_request("2", "Once", SHORT)
    engine.add_request("3", "Once", SHORT)
    assert engine.get_num_unfinished_requests() == 3
    engine.abort_request("2")
    engine.abort_request(["3", "unknown"])
    outputs = {each.request_id: each for each in finish(engine)}
    assert outputs["1"].outputs[0].token_ids == expected.outputs[0].token_ids
    assert [outputs[each].outputs[0].finish_reason for each in "23"] == ["abort"] * 2
    assert engine.get_num_unfinished_requests() == 0
    assert engine.get_tokenizer() is engine.tokenizer
    assert {each.name for each in engine.get_metrics()} == {m.name for m in llm.get_metrics()}
    assert engine.model_config is llm.model_config
    assert engine.reset_prefix_cache()
    with pytest.raises(RequestError, match="request_ids must be a string or a list; got 7"):
        engine.abort_request(7)  # type: ignore[arg-type]  # as a caller might
    names = (  # "from_engine_args" is in `CALLS`
        "abort_request add_lora add_request from_engine_args get_metrics "
        "get_num_unfinished_requests get_supported_tasks get_tokenizer has_unfinished_requests "
        "list_loras model_config remove_lora reset_prefix_cache step tokenizer"
    )
    assert running("LLMEngine") == {*names.split()}


CONFIGS = {
    "LLMEngine": (
        "model_config vllm_config cache_config scheduler_config parallel_config device_config "
        "load_config lora_config decoding_config speculative_config observability_config "
        "tokenizer get_tokenizer get_tokenizer_group get_model_config get_vllm_config "
        "model_executor engine_core output_processor scheduler"
    ),
    "AsyncLLM": (
        "get_model_config get_vllm_config get_scheduler_config get_parallel_config model_config "
        "vllm_config cache_config get_lora_config get_decoding_config tokenizer get_tokenizer"
    ),
    "LoadedModelConfig": (
        "max_model_len dtype vocab_size get_vocab_size get_hidden_size get_head_size hf_config "
        "hf_text_config model tokenizer tokenizer_mode seed revision quantization architectures "
        "architecture get_num_layers get_num_kv_heads get_num_attention_heads get_sliding_window "
        "is_encoder_decoder is_multimodal_model multimodal_config is_moe runner_type max_logprobs "
        "supported_tasks served_model_name enforce_eager get_diff_sampling_param pooler_config"
    ),
    "ModelFacts": (
        "max_model_len model dtype quantization hf_config hf_text_config get_vocab_size tokenizer "
        "seed get_hidden_size get_num_layers is_multimodal_model supported_tasks runner_type "
        "served_model_name get_diff_sampling_param is_encoder_decoder pooler_config"
    ),
}
"""The names that programs for vLLM, and its own examples, read of an engine's configurations."""


@pytest.mark.parametrize("owner", CONFIGS)
def test_a_name_of_vllms_configurations_is_answered_or_refused_with_the_remedy(
    owner: str, llm: LLM, async_llm: AsyncLLM
):
    facts = asyncio.run(async_llm.get_model_config())
    objects = {"LLMEngine": llm.llm_engine, "AsyncLLM": async_llm, "ModelFacts": facts}
    subject = objects.get(owner, llm.llm_engine.model_config)
    for name in {*CONFIGS[owner].split(), *REFUSED[owner]}:
        if hasattr(subject, name):
            continue
        with pytest.raises(UnsupportedNameError) as caught:  # a raw AttributeError is an error
            getattr(subject, name)
        assert f"{owner} has no {name}: {REFUSED[owner][name]}" in str(caught.value)


def test_a_model_configuration_has_the_context_that_the_engine_gives_it(llm: LLM):
    config = llm.llm_engine.model_config
    assert config is llm.model_config
    assert config.max_model_len == llm.engine.max_model_len == ARGS.max_model_len
    assert config.get_vocab_size() == config.vocab_size == llm.engine.vocab_size
    assert config.get_hidden_size() == config.num_heads * config.get_head_size()


def test_an_async_llm_has_vllms_members(llm: LLM):
    async def main() -> dict[str, Any]:
        async with mie.AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**vars(ARGS))) as engine:
            stream = engine.generate("Once", SHORT, "1")
            first = await anext(stream)
            unfinished = await engine.get_num_unfinished_requests()
            await engine.abort("1")
            last = [each async for each in stream][-1:]
            await engine.check_health()
            with pytest.raises(RequestError, match="set enable_lora=True"):
                await engine.add_lora(mie.LoRARequest("poet", 1, "nothing"))
            with pytest.raises(RequestError, match="set enable_lora=True"):
                await engine.remove_lora(1)
            with pytest.raises(RequestError, match="set enable_lora=True"):
                await engine.list_loras()
            return {
                **dict.fromkeys(("add_lora", "remove_lora", "list_loras"), True),
                "abort": first.finished or last[0].finished,
                "check_health": True,
                "dead_error": engine.dead_error is None,
                "errored": not engine.errored,
                "from_engine_args": engine,
                "generate": first.outputs[0].token_ids,
                "get_num_unfinished_requests": unfinished in (0, 1),
                "get_supported_tasks": await engine.get_supported_tasks(),
                "get_tokenizer": await engine.get_tokenizer() is engine.tokenizer,
                "is_running": engine.is_running,
                "is_stopped": not engine.is_stopped,
                "is_tracing_enabled": not await engine.is_tracing_enabled(),
                "reset_prefix_cache": await engine.reset_prefix_cache(),
                "shutdown": engine.shutdown() is None,  # type: ignore[func-returns-value]
                "tokenizer": engine.tokenizer,
            }

    results = asyncio.run(main())
    assert results.keys() == running("AsyncLLM")
    assert all(results.values())


def test_from_optional_gives_defaults_for_none():
    fields = {each.name for each in dataclasses.fields(SamplingParams)}
    nones = dict.fromkeys(fields - {"max_tokens"})
    assert running("SamplingParams.from_optional") <= fields
    assert SamplingParams.from_optional(**nones) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None) == SamplingParams(max_tokens=None)
    with pytest.raises(ConfigError, match="top_p must be a number"):
        SamplingParams.from_optional(top_p=2)


@pytest.mark.parametrize("owner", ["RequestOutput", "CompletionOutput", "RequestMetrics"])
def test_an_output_has_vllms_fields(owner: str, output: RequestOutput):
    subject: Any = {
        "RequestOutput": output,
        "CompletionOutput": output.outputs[0],
        "RequestMetrics": output.metrics,
    }[owner]
    absent = (
        "lora_request encoder_prompt encoder_prompt_token_ids prompt_token_id_logprobs "
        "kv_transfer_params ec_transfer_params routed_experts sampling_mask spec_decode_metrics "
        "weight_versions stop_reason"
    )
    without = absent.split()
    for name in running(owner):
        assert (getattr(subject, name) is None) == (name in without), name
        assert name in dir(subject)
    assert not {"encoder_prompt", "kv_transfer_params"} & output.as_dict().keys()
    assert RequestOutput.from_dict(output.as_dict()) == output


def test_mie_itself_has_the_names_of_vllms_modules(output: RequestOutput):
    from mie import Logprob, TextPrompt

    assert TextPrompt(prompt="Once") == {"prompt": "Once"}
    assert isinstance(next(iter(output.outputs[0].logprobs[0].values())), Logprob)  # type: ignore[index]
    assert running("Logprob") == {each.name for each in dataclasses.fields(Logprob)}
    assert ".".join(map(str, mie.__version_tuple__)) == mie.__version__


@pytest.mark.parametrize("prompt", [{"prompt": "Once"}, {"prompt_token_ids": [5], "prompt": "x"}])
def test_the_keys_of_prompts_run(prompt: Any, llm: LLM):
    [output] = llm.generate([{**prompt, "cache_salt": "a"}], SHORT, use_tqdm=False)
    assert output.prompt == prompt["prompt"]
    assert running("TokensPrompt") == {"cache_salt", "prompt", "prompt_token_ids"}
    assert running("TextPrompt") == {"cache_salt", "prompt"}


def test_unknown_options_are_refused_with_a_suggestion(llm: LLM):
    with pytest.raises(ConfigError, match=r"LLM.generate has no parameter 'priorit'; did you mean"):
        llm.generate("Once", SHORT, priorit=1)
    with pytest.raises(ConfigError, match=r"pass \{'prompt_token_ids': ids, "):
        llm.generate(["Once"], SHORT, prompt_token_ids=[[1]])
