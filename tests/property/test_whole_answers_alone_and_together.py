"""Check whole answers: random parts give the same tokens alone, together, preempted and drafted.

An answer may have reasoning, calls of tools, and a text that follows a schema or a structural tag.
The first engine takes one token after another, for one request at a time. The other engines run all
requests of a mix at once. Every answer that ends is valid.
"""

import importlib.util
import json
import os
import re
from collections import Counter
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rare import check_until_seen

from mie import LLM, SamplingParams
from mie.text.tools.table import CALLS

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

MODEL = os.environ.get("MIE_MODEL", "bundled")
IS_QUICK = settings().max_examples <= 40 and importlib.util.find_spec("numba") is not None
BACKEND = os.environ.get("MIE_BACKEND", "jit" if IS_QUICK else "numpy")
"""A model and a backend for a longer run, with ``MIE_HYPOTHESIS=far``. `make test` takes the faster
backend."""
FAR_MIXES = {"numpy": 1500, "jit": 1500, "cupy-emulated": 12} if MODEL == "bundled" else {}
NUM_MIXES = FAR_MIXES.get(BACKEND, 20) if settings().max_examples > 40 else 3
"""Mixes of 2 to 4 requests. 1,500 mixes have about 4,000 requests. The emulator is slow."""

COMMON = {
    "backend": BACKEND,
    "dtype": "float64" if BACKEND == "numpy" else "float32",
    "max_model_len": 128,
    "block_size": 8,
}
if BACKEND in ("numpy", "jit"):
    COMMON["num_threads"] = 1
ENGINES = {
    "batch": {},
    "recompute": {"num_blocks": 16},
    "swap": {"num_blocks": 16, "preemption_mode": "swap", "swap_space": 2**22},
    "small budget": {"max_num_batched_tokens": 7, "max_prefill_chunk": 3},
    "overlap": {"async_scheduling": True},
    "short runs": {"max_forced_run": 2},
    "drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    },
    "suffix drafts": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
}
if MODEL != "bundled":  # each engine holds the weights
    ENGINES = {name: ENGINES[name] for name in ("recompute", "drafts")}
OPENINGS = ["", "<think>\n", "<think>\n\n</think>\n\n"]
MARKS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama3_json": "<|python_tag|>",
    "phi4_mini_json": "functools[",
    "qwen3_coder": "<function= <parameter=",
    "deepseek_v31": "<｜tool▁sep｜>",
    "llama4_pythonic": "<|python_start|>",
}
"""The formats of calls, and the marks in a chat template by which they are found."""

seen: Counter[str] = Counter()

leaves = st.one_of(
    st.lists(st.sampled_from([0, 1, True, None, "x", "no"]), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.integers(-9, 9).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 20}),
    st.integers(0, 3).map(lambda most: {"type": "string", "maxLength": most}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
)


@st.composite
def schemas(draw):
    properties = draw(st.dictionaries(st.sampled_from(["a", "b", "cd"]), leaves, max_size=3))
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if draw(st.booleans())],
        "additionalProperties": False,
    }


@st.composite
def structures(draw):
    """Draw a structure, and the schema or the pattern that its text follows."""
    kind = draw(st.sampled_from(["json", "regex", "choice", "tags"]))
    if kind == "json":
        schema = draw(schemas())
        return {"json": schema}, schema
    if kind == "regex":
        return {"regex": "[0-9]{2}(ab|c){1,3}"}, r"[0-9]{2}(ab|c){1,3}"
    if kind == "choice":
        return {"choice": ["yes", "yesterday", "no"]}, "yes|yesterday|no"
    tag = {"begin": "<f>", "content": {"type": "regex", "pattern": "[ab]{2}"}, "end": "</f>"}
    form = {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [tag],
        "at_least_one": draw(st.booleans()),
        "stop_after_first": True,
    }
    pattern = "<f>[ab]{2}</f>"
    if not form["at_least_one"]:
        pattern = f"(?:(?!<f).)*(?:{pattern})?"
    return {"structural_tag": {"format": form}}, pattern


@st.composite
def requests(draw):
    """Draw the parameters of an answer."""
    kind = draw(st.sampled_from(["calls", "structure", "both"]))
    asked = {
        "opening": draw(st.sampled_from(OPENINGS)),
        "format": draw(st.sampled_from([*MARKS])),
        "structure": None if kind == "calls" else draw(structures()),
        "tools": None,
        "choice": None,
        "temperature": draw(st.sampled_from([0.0, 1.0, 1000.0])),
        "seed": draw(st.integers(0, 99)),
        "budget": draw(st.sampled_from([None, None, 0, 1, 3])),
        "n": draw(st.sampled_from([1, 1, 1, 2])),
        "max_tokens": draw(st.sampled_from([60, 40, 9])),
        "is_parallel": draw(st.sampled_from([False, False, True])),
        "is_begun": draw(st.sampled_from([True, True, False])),
    }
    if kind != "structure":
        names = draw(st.lists(st.sampled_from(["f", "get"]), min_size=1, max_size=2, unique=True))
        asked["tools"] = {name: (draw(schemas()), draw(st.booleans())) for name in names}
        choices = ["auto", "allowed"] if asked["structure"] else ["auto", "required", "allowed"]
        asked["choice"] = draw(st.sampled_from(choices))
    return asked


@cache
def engine(name):
    """Return an engine. The first one takes tokens one by one."""
    settings = {"max_forced_run": 0} if name == "alone" else ENGINES[name]
    return LLM(MODEL, reasoning_parser="qwen3", **COMMON, **settings)


def prompt_of(llm, asked):
    options = {}
    if asked["tools"] is not None:
        options["tools"] = [
            {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
            for name, (schema, strict) in asked["tools"].items()
        ]
        first = {"type": "function", "function": {"name": next(iter(asked["tools"]))}}
        options["tool_choice"] = asked["choice"]
        if asked["choice"] == "allowed":
            options["tool_choice"] = {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [first]},
            }
        options["parallel_tool_calls"] = asked["is_parallel"]
    mark = f"{{# {MARKS[asked['format']]} #}}"
    template = "{{ messages[0].content }}{% if tools %} {{ tools[0].function.name }}{% endif %}"
    user = [{"role": "user", "content": "Who lives at the mill by the sea?"}]
    return llm.chat_prompt(user, chat_template=template + asked["opening"] + mark, **options)


def beginning_of(asked):
    """Return the beginning of an answer with a call, because the model rarely begins one."""
    is_free = asked["choice"] in ("auto", "allowed") and asked["structure"] is None
    is_short = asked["opening"] == "<think>\n" and asked["budget"] is not None
    if not asked["is_begun"] or not is_free or is_short:
        return ""
    thought = "Hm.</think>" if asked["opening"] == "<think>\n" else ""
    return f"{thought}So. {CALLS[asked['format']].triggers[0]}"


def params_of(llm, asked):
    begun = llm.tokenizer.encode(beginning_of(asked), add_special_tokens=False)
    return SamplingParams(
        trace_decode_token_ids=begun or None,
        n=asked["n"],
        temperature=asked["temperature"],
        seed=asked["seed"],
        max_tokens=asked["max_tokens"] + len(begun),
        structured_outputs=asked["structure"] and asked["structure"][0],
        thinking_token_budget=asked["budget"],
    )


def visible(output):
    return [
        (
            choice.token_ids,
            choice.text,
            choice.reasoning,
            [(call.name, call.arguments) for call in choice.tool_calls or ()],
            choice.finish_reason,
        )
        for choice in output.outputs
    ]


def check_valid(asked, output):
    for choice in output.outputs:
        seen["answers"] += 1
        if choice.finish_reason != "stop":
            continue
        seen["ended"] += 1
        seen["reasoned"] += bool(choice.reasoning)
        calls = choice.tool_calls or ()
        seen["called"] += bool(calls)
        for call in calls:
            schema, is_strict = asked["tools"][call.name]
            if asked["choice"] == "required" or is_strict or asked["structure"]:
                check_arguments(call.arguments, schema, asked["format"])
        if asked["choice"] == "required":
            assert calls
            assert choice.text == ""
        if not asked["is_parallel"]:
            assert len(calls) <= 1
        if asked["structure"] and not calls:
            check_text(choice.text, asked["structure"][1])
        if asked["opening"].endswith("</think>\n\n"):
            assert not choice.reasoning


def check_text(text, wanted):
    if isinstance(wanted, str):
        # The space between the reasoning and a text belongs to neither.
        assert re.fullmatch(wanted, text, re.DOTALL) or re.fullmatch(wanted, f"\n{text}", re.DOTALL)
        seen["patterns"] += 1
    else:
        jsonschema.validate(json.loads(text), wanted)
        seen["schemas"] += 1


def check_arguments(arguments, schema, form):
    if CALLS[form].parameters is None:
        jsonschema.validate(json.loads(arguments), schema)
    else:  # text between tags becomes a value by the types of the schema
        assert set(json.loads(arguments)) <= set(schema["properties"])


LONG = {
    "opening": "<think>\n",
    "format": "hermes",
    "structure": ({"regex": "[ab]{36}"}, "[ab]{36}"),
    "tools": {"f": ({"type": "object", "properties": {}, "required": []}, True)},
    "choice": "auto",
    "temperature": 1000.0,
    "budget": 3,
    "n": 1,
    "max_tokens": 60,
    "is_parallel": True,
    "is_begun": False,
}
"""A request. Some of them together need more blocks than a small pool has."""
MANY = [{**LONG, "seed": seed} for seed in range(4)]


@given(mix=st.lists(requests(), min_size=2, max_size=4), name=st.sampled_from([*ENGINES]))
@example(mix=MANY, name="recompute")
@example(mix=MANY, name="swap" if "swap" in ENGINES else "drafts")
@settings(max_examples=NUM_MIXES)
def check_mix(mix, name):
    alone, together = engine("alone"), engine(name)
    before = together.engine.stats.num_preemptions
    prompts = [prompt_of(together, asked) for asked in mix]
    params = [params_of(together, asked) for asked in mix]
    outputs = together.generate(prompts, params, use_tqdm=False)
    for asked, one, output in zip(mix, params, outputs, strict=True):
        [expected] = alone.generate(prompt_of(alone, asked), one, use_tqdm=False)
        assert visible(output) == visible(expected)
        check_valid(asked, output)
        seen["forced"] += output.metrics.num_forced_tokens > 0
        seen["requests"] += 1
    seen["preempted"] += together.engine.stats.num_preemptions > before
    seen[name] += 1
    assert together.engine.scheduler.manager.num_used == 0


def test_whole_answers_are_the_same_alone_and_together():
    wanted = {"ended": 4, "reasoned": 1, "called": 1, "forced": 2, "preempted": 1}
    check_until_seen(lambda check: check(), check_mix, seen, wanted)
