"""Make requests that ask for too much, or are malformed, in children of ``zygote.py``."""

import asyncio
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from mie import LLM, AsyncLLM, SamplingParams
from mie.errors import MieError

MEGABYTES_10 = 10_000_000
LONG_TEXT = "a" * MEGABYTES_10
"""It is made once, because each worker of the tests has all cases in memory."""
BIG = 10**9
LONG = 10**5000
"""An integer with too many digits for Python to print."""


@functools.cache
def llm() -> LLM:
    """Return the bundled model, loaded before the children are forked."""
    return LLM("bundled", num_threads=1, use_tqdm_on_load=False)


def sampled(**params: Any) -> Callable[[], object]:
    """Return a request with these parameters."""
    return lambda: llm().generate("a", SamplingParams(**params), use_tqdm=False)


def assigned(name: str, value: Any) -> Callable[[], object]:
    """Return a request with a parameter that is assigned after construction."""

    def run() -> object:
        params = SamplingParams()
        setattr(params, name, value())
        return llm().generate("a", params, use_tqdm=False)

    return run


def prompted(prompt: Callable[[], Any], **options: Any) -> Callable[[], object]:
    """Return a request with a prompt."""
    return lambda: llm().generate(prompt(), use_tqdm=False, **options)


def queued(prompt: Any = "a", params: Any = None, **options: Any) -> Callable[[], object]:
    """Return a request that is queued to be stepped through."""
    return lambda: llm().add_request(prompt, params or SamplingParams(), **options)


def streamed(prompt: Any, *params: Any) -> Callable[[], object]:
    """Return a request whose outputs are streamed."""
    return lambda: list(llm().stream(prompt, *params))


def chatted(messages: Any, **options: Any) -> Callable[[], object]:
    """Return a conversation."""
    return lambda: llm().chat(messages, use_tqdm=False, **options)


def nested(depth: int) -> Any:
    """Return deeply nested lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


forever = itertools.repeat

PARAMETERS: dict[str, tuple[Callable[[], object], str]] = {
    "n": (sampled(n=BIG), "n must be an integer in 1 … 1024; got 1000000000"),
    "n that cannot be printed": (sampled(n=LONG), "n must be an integer in 1 … 1024"),
    "n assigned": (assigned("n", lambda: BIG), "n must be an integer in 1 … 1024"),
    "max_tokens": (sampled(max_tokens=-LONG), "max_tokens must be an integer"),
    "a long seed": (sampled(seed=LONG), "seed must be an integer"),
    "a long temperature": (sampled(temperature=LONG), "temperature must be a number"),
    "many stop strings": (lambda: SamplingParams(stop=[str(i) for i in range(10**5)]),
                          "stop may have at most 256 entries"),
    "endless stop strings": (lambda: SamplingParams(stop=forever("a")), "stop may have at most"),
    "an endless iterator assigned": (assigned("stop", lambda: forever("a")), "iterator"),
    "endless counting": (lambda: SamplingParams(stop_token_ids=itertools.count()), "at most 4096"),
    "a stop string of 10 MB": (lambda: SamplingParams(stop=LONG_TEXT),
                               "at most 1024 characters; got 10000000"),
    "deep stop": (sampled(stop=nested(10_000)), "each of stop must be a non-empty"),
    "a range of stop ids": (sampled(stop_token_ids=range(BIG)), "at most 4096 entries"),
    "an unhashable stop id": (sampled(stop_token_ids=[[1]]), "each of stop_token_ids"),
    "a long stop id": (sampled(stop_token_ids=[LONG]), "each of stop_token_ids must be an integer"),
    "a range of allowed ids": (sampled(allowed_token_ids=range(BIG)), "allowed_token_ids"),
    "endless allowed ids": (lambda: SamplingParams(allowed_token_ids=forever(1)), "at most"),
    "endless bad words": (lambda: SamplingParams(bad_words=forever("a")), "at most 1024 entries"),
    "a bad word of 10 MB": (lambda: SamplingParams(bad_words=[LONG_TEXT]), "bad_words"),
    "endless bad ids": (lambda: SamplingParams(bad_words_token_ids=forever([1])), "at most 2048"),
    "endless ids of a bad word": (lambda: SamplingParams(bad_words_token_ids=[forever(1)]),
                                  "at most 1028 entries"),
    "deep bad ids": (sampled(bad_words_token_ids=nested(10_000)), "bad_words_token_ids"),
    "endless biases": (lambda: SamplingParams(logit_bias=forever(1)), "logit_bias must map"),
    "many biases": (lambda: SamplingParams(logit_bias=dict.fromkeys(range(2**20 + 1), 1.0)),
                    "logit_bias may have at most 1048576 entries"),
    "biases of unprintable ids": (sampled(logit_bias={LONG: 1.0}),
                                  "logit_bias must have token ids"),
    "biases of text": (sampled(logit_bias={"1" * 5000: 1}), "logit_bias must have token ids"),
    "many extra arguments": (lambda: SamplingParams(extra_args=dict.fromkeys(range(10**6))),
                             "extra_args may have at most 1024 entries"),
    "truncation": (sampled(truncate_prompt_tokens=BIG), "truncate_prompt_tokens is 1000000000"),
    "log-probabilities": (sampled(logprobs=-LONG), "logprobs must be an integer"),
    "sampling parameters that are a number": (streamed("a", 5), "sampling_params must be"),
    "sampling parameters that are a mapping": (streamed("a", {"n": 1}), "sampling_params must be"),
    "sampling parameters of the wrong number": (
        prompted(lambda: "a", sampling_params=[SamplingParams()] * 5), "1 prompts need 1"),
    "an unknown parameter": (lambda: SamplingParams(best_off=1), "best_off"),  # type: ignore[call-arg]
}  # fmt: skip

PROMPTS: dict[str, tuple[Callable[[], object], str]] = {
    "a number": (prompted(lambda: 5), "prompts must be a prompt or a list of prompts; got 5"),
    "None": (prompted(lambda: None), "prompts must be a prompt or a list of prompts; got None"),
    "an endless iterator": (prompted(lambda: forever("a")), "prompts must be a prompt or a list"),
    "bytes": (prompted(lambda: b"abc"), "prompts must be a prompt or a list"),
    "bytes of 10 MB": (prompted(lambda: b"a" * MEGABYTES_10), "prompts must be a prompt"),
    "a list of None": (prompted(lambda: [None]), "a prompt is a text or a list of token ids"),
    "an empty prompt": (prompted(lambda: [[]]), "prompt is empty"),
    "empty prompts of arrays": (prompted(lambda: np.array([], int)), "prompt is empty"),
    "a deep list": (prompted(lambda: nested(10_000)), "prompt has token id"),
    "a long list in a prompt": (prompted(lambda: [[[1] * 10**6]]), "prompt has token id"),
    "an unhashable id": (prompted(lambda: [1, {}]), "prompt has token id {}"),
    "an id that cannot be printed": (prompted(lambda: [1, LONG]), "prompt has token id"),
    "an id outside": (prompted(lambda: [1, BIG]), "prompt has token id 1000000000"),
    "an array of three dimensions": (prompted(lambda: np.ones((2, 2, 2), int)), "prompts must be"),
    "an array of many ids": (prompted(lambda: np.ones(10**7, np.int8)), "10000000 tokens"),
    "a range of ids": (prompted(lambda: range(BIG)), "prompt has 1000000000 tokens"),
    "a range of ids in a mapping": (prompted(lambda: {"prompt_token_ids": range(BIG)}),
                                    "prompt has 1000000000 tokens"),
    "many ids": (prompted(lambda: [1] * 10**7), "prompt has 10000000 tokens"),
    "ids that are an iterator": (prompted(lambda: {"prompt_token_ids": forever(1)}),
                                 "prompt_token_ids must be a list"),
    "ids that are text": (prompted(lambda: {"prompt_token_ids": "abc"}), "must be a list"),
    "text that is a number": (prompted(lambda: {"prompt": 5}), "text must be a string; got 5"),
    "an empty mapping": (prompted(dict), "needs 'prompt' or 'prompt_token_ids'"),
    "a mapping with other keys": (prompted(lambda: {"text": "a"}), "got 'text'"),
    "a mapping with many keys": (prompted(lambda: dict.fromkeys(range(10**6))), "needs 'prompt'"),
    "an unknown key": (prompted(lambda: {"prompt": "a", "sparkle": {}}), "no key 'sparkle'"),
    "a key of vLLM": (prompted(lambda: {"prompt": "a", "multi_modal_data": {}}),
                      "multi_modal_data is not supported"),
    "10 MB of text": (prompted(lambda: "a " * 5_000_000),
                      "prompt has 10000000 characters; the limit is 65536 (shorten it, or raise "
                      "max_prompt_chars in request_limits)"),
    "10 MB of text, truncated": (
        lambda: llm().generate("a " * 5_000_000, SamplingParams(truncate_prompt_tokens=5)),
        "the limit is 65536"),
    "the longest text": (prompted(lambda: "猫" * 65_536), "the context holds 1024"),
    "an unpaired surrogate": (prompted(lambda: "\ud800"), "unpaired surrogate"),
    "10 MB in a batch": (prompted(lambda: ["a", LONG_TEXT]), "the limit is 65536"),
    "a stream of a number": (streamed(5), "a prompt is a text or a list of token ids; got 5"),
    "a stream of 10 MB": (streamed(LONG_TEXT), "the limit is 65536"),
    "a queued iterator": (queued(forever(1)), "a prompt is a text or a list of token ids"),
}  # fmt: skip

LABELS: dict[str, tuple[Callable[[], object], str]] = {
    "a long request id": (queued(request_id=LONG_TEXT), "at most 1024 characters"),
    "an empty request id": (queued(request_id=""), "request_id must be a non-empty"),
    "a request id that is a number": (queued(request_id=LONG), "request_id must be a non-empty"),
    "an id of mie's own": (queued(request_id="auto-1"), "choose another"),
    "priority that cannot be printed": (queued(priority=LONG), "priority must be in -2**63"),
    "priority without its policy": (queued(priority=2**62), "scheduling_policy='priority'"),
    "the wrong number of priorities": (prompted(lambda: "a", priority=[1, 2]), "1 prompts need 1"),
    "a long salt": (queued({"prompt": "a", "cache_salt": LONG_TEXT}),
                    "cache_salt may have at most 1024 characters"),
    "a salt that is a list": (queued({"prompt": "a", "cache_salt": []}), "cache_salt must be"),
    "aborting a list": (lambda: llm().abort(["a"]), "request_id must be a non-empty"),
}  # fmt: skip

CHATS: dict[str, tuple[Callable[[], object], str]] = {
    "a number": (chatted(5), "messages must be a list"),
    "an endless iterator": (chatted(forever({})), "messages must be a list"),
    "a range": (chatted(range(BIG)), "messages has 1000000000 entries"),
    "an empty conversation": (chatted([[]]), "messages is empty"),
    "no role": (chatted([{"content": "a"}]), "must have a role"),
    "a long role that is no text": (chatted([{"role": [LONG_TEXT]}]), "have a role"),
    "a role that cannot be printed": (chatted([{"role": LONG}]), "must have a role"),
    "a part of a long kind": (
        chatted([{"role": "user", "content": [{"type": LONG_TEXT}]}]), "parts of type"),
    "a deep content": (chatted([{"role": "tool", "content": nested(100_000)}]), "JSON values"),
    "a content that cannot be printed": (chatted([{"role": "tool", "content": LONG}]), "JSON"),
    "10 MB": (chatted([{"role": "user", "content": LONG_TEXT}]), "the limit is"),
    "many messages": (chatted([{"role": "user", "content": "a"}] * 10**6),
                      "messages has 1000000 entries; the limit is 65536"),
    "many parts": (chatted([{"role": "user", "content": ["a" * 20] * 10**6}]), "the limit is"),
    "deep arguments": (chatted([{"role": "assistant", "tool_calls": [
        {"function": {"name": "a", "arguments": "[" * 10**6}}]}]), "the limit is 65536"),
    "deep arguments that end": (chatted([{"role": "assistant", "tool_calls": [{"function": {
        "name": "a", "arguments": "[" * 10**6 + "]" * 10**6}}]}]), "the limit is 65536"),
    "deep arguments of few characters": (chatted([{"role": "assistant", "tool_calls": [{
        "function": {"name": "a", "arguments": '{"a":' * 9999 + "1" + "}" * 9999}}]}]),
        "the limit is"),
    "deep tools": (chatted([{"role": "user", "content": "a"}], tools=[nested(100_000)]), "tools"),
    "another template": (chatted([{"role": "user", "content": "a"}],
                                 chat_template="{% for i in range(99999) %}{{ 'a' * 40 }}"
                                 "{% endfor %}"), "the limit is"),
}  # fmt: skip

GROUPS = {"parameters": PARAMETERS, "prompts": PROMPTS, "labels": LABELS, "chats": CHATS}


def run(group: str, name: str) -> str:
    """Make a hostile request."""
    return str(GROUPS[group][name][0]())


def run_beside_others(group: str, name: str) -> str:
    """Make a hostile request while others run, which it must not affect."""
    own = SamplingParams(max_tokens=8, temperature=0.0)
    expected = llm().generate("Once upon a time", own, use_tqdm=False)
    stream = llm().stream("Once upon a time", own)
    next(stream)
    error: MieError | None = None
    try:
        GROUPS[group][name][0]()
    except MieError as refusal:
        error = refusal
    last = list(stream)[-1]
    assert last.outputs[0].text == expected[0].outputs[0].text
    assert not llm().engine.has_work
    assert llm().engine.scheduler.manager.num_used == 0
    if error is not None:
        raise error
    return "not refused"


def run_async(prompt: str, params: str) -> str:
    """Make a hostile request to `AsyncLLM` beside one that continues."""
    return asyncio.run(_beside(*ASYNC[prompt, params]))


ASYNC: dict[tuple[str, str], tuple[Any, Any]] = {
    ("number", "none"): (5, None),
    ("iterator", "none"): (forever("a"), None),
    ("long", "none"): (LONG_TEXT, None),
    ("text", "empty"): ("a", {}),
}


async def _beside(prompt: Any, params: Any) -> str:
    async with AsyncLLM("bundled", num_threads=1, use_tqdm_on_load=False) as own:

        async def text(prompt: Any, params: Any) -> str:
            last = None
            async for output in own.generate(prompt, params):
                last = output
            assert last is not None
            return str(last.outputs[0].token_ids)

        good = text("Once upon a time", SamplingParams(max_tokens=12, temperature=0.0))
        results = await asyncio.gather(good, text(prompt, params), return_exceptions=True)
        again = await text("Once upon a time", SamplingParams(max_tokens=12, temperature=0.0))
        assert results[0] == again
        if isinstance(results[1], BaseException):
            raise results[1]
        return "not refused"


# Requests as large as the limits allow.


def _step(**params: Any) -> str:
    sampling = SamplingParams(max_tokens=4, temperature=1.0, seed=1, **params)
    return str(len(llm().generate("Once upon a time", sampling, use_tqdm=False)))


LARGEST: dict[str, Callable[[], object]] = {
    "stop strings": lambda: _step(stop=[f"{i:03}" + "x" * 1021 for i in range(256)]),
    "stop strings of one letter": lambda: _step(stop=["x" * 1024] * 256),
    "stop ids": lambda: _step(stop_token_ids=[*range(2047)] * 2, min_tokens=1),
    "biases": lambda: _step(logit_bias=dict.fromkeys(range(2048), 1.0)),
    "allowed ids": lambda: _step(allowed_token_ids=[1000] * 2**20),
    "forced ids": lambda: _step(trace_decode_token_ids=[1000] * 2**20),
    "bad words": lambda: _step(bad_words=[f"{i:04}" + "猫" * 252 for i in range(1024)]),
    "ids of bad words": lambda: _step(bad_words_token_ids=[[5] * 1028] * 2048),
    "a request id": lambda: llm().abort(
        llm().add_request("a", SamplingParams(), request_id="猫" * 1024)
    ),
    "numbers of NumPy": lambda: llm().generate(
        np.array([[1, 2], [3, 4]]), SamplingParams(max_tokens=np.int64(2)), use_tqdm=False
    ),
}


def run_largest(name: str) -> str:
    """Make a request that is as large as the limits allow."""
    return str(LARGEST[name]())[:100]
