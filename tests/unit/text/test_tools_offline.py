"""Check `LLM.chat` and `AsyncLLM` with tools: outputs have calls and reasoning."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import mie
from mie import LLM, RequestOutput, SamplingParams
from mie.errors import RequestError
from mie.text.tools.table import CALLS, HERMES, MARKS

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

MESSAGES = [{"role": "user", "content": "Who lives at the mill?"}]
SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "place": {"enum": ["lake", "mill"]},
            "note": {"type": "string", "maxLength": 5},
        },
        "required": ["place", "note"],
    },
    "add": {
        "type": "object",
        "properties": {"all": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3}},
        "required": ["all"],
        "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
    "stop": {"type": "object", "properties": {}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


@cache
def bundled(**settings: Any) -> LLM:
    return LLM("bundled", num_threads=1, **settings)


def chat(llm: LLM, params: SamplingParams, **options: Any) -> RequestOutput:
    [output] = llm.chat(MESSAGES, params, use_tqdm=False, **options)
    return output


def writing(llm: LLM, text: str, **more: Any) -> SamplingParams:
    """Return parameters under which the model writes a text, and ends there."""
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    return SamplingParams(trace_decode_token_ids=ids, max_tokens=len(ids), **more)


# Forced calls are valid by construction.

TEMPLATES = {
    **{name: " ".join(marks) for name, marks in reversed(MARKS)},
    "mistral_v11": "[TOOL_CALLS] [ARGS]",
}
UNMARKED = {*CALLS} - {*TEMPLATES} - {name for name in CALLS if CALLS[name] == HERMES}
"""Formats that no template shows; their names choose them."""
QUICK = {
    *("hermes", "llama3_json", "mistral", "mistral_v11", "openai", "kimi_k2", "qwen3_coder"),
    *("deepseek_v32", "glm45", "gemma4", "olmo3", "lfm2"),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in [*TEMPLATES, *sorted(UNMARKED)]
    ],
)
@pytest.mark.parametrize("choice", ["required", "named"])
def test_forced_calls_are_valid_in_every_format_whatever_is_sampled(name: str, choice: str):
    llm = bundled(tool_call_parser=name) if name in UNMARKED else bundled()
    asked: Any = {"type": "function", "function": {"name": "weather"}}
    output = chat(
        llm,
        SamplingParams(n=4, temperature=1000, seed=7, max_tokens=500),
        tools=TOOLS,
        tool_choice="required" if choice == "required" else asked,
        chat_template=f"{{{{ tools[0].function.name }}}}{{# {TEMPLATES.get(name, '')} #}}",
    )
    for completion in output.outputs:
        if completion.finish_reason != "stop":
            continue
        assert completion.text == ""
        assert completion.tool_calls
        for call in completion.tool_calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        if choice == "named":
            assert [call.name for call in completion.tool_calls] == ["weather"]
    assert any(completion.finish_reason == "stop" for completion in output.outputs)


# Reading the model's text.


def test_calls_are_read_and_leave_the_text():
    llm = bundled()
    output = chat(llm, writing(llm, f"I stop.\n{CALL}"), tools=TOOLS)
    completion = output.outputs[0]
    assert completion.text == "I stop."
    assert [(call.name, call.arguments) for call in completion.tool_calls or ()] == [("stop", "{}")]
    assert completion.reasoning is None
    assert output.metrics is not None
    assert (output.metrics.num_tool_calls, output.metrics.num_unparsed_calls) == (1, 0)


def test_text_between_tags_becomes_what_the_schema_says():
    llm = bundled()
    text = (
        "I add.\n<tool_call>\n<function=add>\n<parameter=all>\n[1, 2]\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    template = "{{ tools[0].function.name }}{# <function= <parameter= #}"
    output = chat(llm, writing(llm, text), tools=TOOLS, chat_template=template)
    completion = output.outputs[0]
    assert completion.text == "I add."
    [call] = completion.tool_calls or ()
    assert (call.name, json.loads(call.arguments)) == ("add", {"all": [1, 2]})


def test_reasoning_is_read_where_the_setting_says_so():
    text = "<think>Hm.</think>So."
    plain, thinking = bundled(), bundled(reasoning_parser="qwen3")
    assert chat(plain, writing(plain, text)).outputs[0].text == text
    output = chat(thinking, writing(thinking, text))
    completion = output.outputs[0]
    assert (completion.reasoning, completion.text) == ("Hm.", "So.")
    assert output.metrics is not None
    assert 0 < output.metrics.num_reasoning_tokens < len(completion.token_ids)
    [raw] = thinking.generate("x", writing(thinking, text), use_tqdm=False)
    assert (raw.outputs[0].text, raw.outputs[0].reasoning) == (text, None)


def test_a_structured_answer_in_channels_is_the_final_message():
    llm = bundled()
    template = "{{ messages[0].content }}<|start|>assistant{# <|channel|> #}"
    output = chat(
        llm, SamplingParams(structured_outputs={"choice": ["mill"]}), chat_template=template
    )
    assert output.outputs[0].text == "mill"
    assert output.prompt == "Who lives at the mill?<|start|>assistant<|channel|>final<|message|>"
    assert llm.tokenizer.decode(output.prompt_token_ids) == output.prompt
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So"
    assert chat(llm, writing(llm, text), chat_template=template).outputs[0].text == text
    thinking = bundled(reasoning_parser="auto")
    completion = chat(thinking, writing(thinking, text), chat_template=template).outputs[0]
    assert (completion.reasoning, completion.text) == ("Hm.", "So")


def test_tags_that_are_special_tokens_are_kept_and_others_are_not(tmp_path: Path):
    """The bundled model with two of its special tokens spelled as Mistral's tags."""
    directory = tmp_path / "model"
    shutil.copytree(Path(mie.__file__).parent / "assets/tiny", directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = directory / name
        text = path.read_text(encoding="utf-8")
        text = text.replace("<|system|>", "[TOOL_CALLS]").replace("<|user|>", "[ARGS]")
        path.write_text(text, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(
        "{{ tools[0].function.name }} [TOOL_CALLS][ARGS]"
    )
    llm = LLM(directory, num_threads=1)
    tag = llm.tokenizer.token_to_id("[TOOL_CALLS]")
    assert tag in llm.tokenizer.special_ids
    params = writing(llm, 'So.<|assistant|>[TOOL_CALLS]stop[ARGS]{"a": 1}')
    completion = chat(llm, params, tools=TOOLS).outputs[0]
    assert completion.text == "So."
    [call] = completion.tool_calls or ()
    assert (call.name, call.arguments, len(call.id)) == ("stop", '{"a": 1}', 9)
    forced = chat(llm, SamplingParams(max_tokens=300), tools=TOOLS, tool_choice="required")
    assert forced.outputs[0].token_ids[0] == tag
    assert forced.outputs[0].tool_calls


# Refusals.


@pytest.mark.parametrize(
    ("options", "params", "message"),
    [
        ({"tools": []}, {}, "tools must have 1 to 1024 entries"),
        ({"tool_choice": "auto"}, {}, "tool_choice needs tools"),
        ({"tools": TOOLS}, {"detokenize": False}, "tools need text; got detokenize=False"),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs and a call that is forced exclude each other",
        ),
        (
            {"tools": TOOLS, "chat_template": "{# #}x"},
            {},
            "tools are written neither by this model's chat template, nor in a message",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(options, params, message):
    with pytest.raises(RequestError, match=message):
        chat(bundled(), SamplingParams(**params), **options)


def test_without_a_parser_tools_are_written_and_nothing_is_read():
    llm = bundled(tool_call_parser="none")
    completion = chat(llm, writing(llm, CALL), tools=TOOLS).outputs[0]
    assert (completion.text, completion.tool_calls) == (CALL, None)
    assert "You may call: weather" in llm.chat_prompt(MESSAGES, tools=TOOLS)["prompt"]
    with pytest.raises(RequestError, match="tool_choice cannot force a call"):
        llm.chat_prompt(MESSAGES, tools=TOOLS, tool_choice="required")
