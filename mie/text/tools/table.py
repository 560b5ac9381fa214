"""List the formats in which models write calls of tools and reasoning, and choose a model's."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from mie.errors import RequestError
from mie.text.tools.families import NO_FORMATS, FamilyFormats
from mie.text.tools.formats import ANALYSIS, HARMONY, CallFormat, Parameters, Tags
from mie.text.tools.response_template import calls_in, reasoning_in

# Calls that are JSON objects, with a name and arguments

HERMES = CallFormat(open="<tool_call>\n", close="\n</tool_call>", separator="\n")
LLAMA3 = CallFormat(
    begin="<|python_tag|>", is_open_optional=True, arguments="parameters", separator="; "
)
MISTRAL = CallFormat(open="[TOOL_CALLS]", is_list=True, separator=", ", id_length=9)
COHERE = CallFormat(
    open="<|START_ACTION|>",
    close="<|END_ACTION|>",
    name="tool_name",
    arguments="parameters",
    is_list=True,
    separator=",\n",
)

# Calls with a name before a JSON object of arguments

MISTRAL_NAMED = CallFormat(
    open="[TOOL_CALLS]", name_close="[ARGS]", id_tag="[CALL_ID]", id_length=9
)
DEEPSEEK_V31 = CallFormat(
    begin="<｜tool▁calls▁begin｜>",
    open="<｜tool▁call▁begin｜>",
    name_close="<｜tool▁sep｜>",
    close="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V31,
    open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_close="\n```json\n",
    close="\n```<｜tool▁call▁end｜>",
    separator="\n",
)
KIMI_K2 = CallFormat(
    begin="<|tool_calls_section_begin|>",
    open="<|tool_call_begin|>",
    name_close="<|tool_call_argument_begin|>",
    close="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    has_index=True,
)

# Calls with tags around each argument

QWEN3_CODER = CallFormat(
    begin="<tool_call>\n",
    open="<function=",
    name_close=">\n",
    close="</function>",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    parameters=Parameters(open="<parameter=", middle=">\n", close="\n</parameter>\n"),
)
SEED_OSS = replace(
    QWEN3_CODER,
    begin="<seed:tool_call>\n",
    separator="\n</seed:tool_call>\n<seed:tool_call>\n",
    end="\n</seed:tool_call>",
    parameters=Parameters(open="<parameter=", middle=">", close="</parameter>\n"),
)
GLM45 = CallFormat(
    open="<tool_call>",
    name_close="\n",
    close="</tool_call>",
    separator="\n",
    parameters=Parameters(
        open="<arg_key>", middle="</arg_key>\n<arg_value>", close="</arg_value>\n"
    ),
)
GLM47 = CallFormat(
    open="<tool_call>",
    close="</tool_call>",
    parameters=Parameters(open="<arg_key>", middle="</arg_key><arg_value>", close="</arg_value>"),
)
HY_V3 = replace(GLM45, begin="<tool_calls>\n", name_close="<tool_sep>\n", end="\n</tool_calls>")
MINIMAX_M2 = CallFormat(
    begin="<minimax:tool_call>\n",
    open='<invoke name="',
    name_close='">\n',
    close="</invoke>",
    separator="\n",
    end="\n</minimax:tool_call>",
    parameters=Parameters(open='<parameter name="', middle='">', close="</parameter>\n"),
)
MINICPM5 = CallFormat(
    open='<function name="',
    name_close='">',
    close="</function>",
    parameters=Parameters(open='<param name="', middle='">', close="</param>"),
)
DEEPSEEK_V32 = CallFormat(
    begin="<｜DSML｜function_calls>\n",
    open='<｜DSML｜invoke name="',
    name_close='">\n',
    close="</｜DSML｜invoke>",
    separator="\n",
    end="\n</｜DSML｜function_calls>",
    parameters=Parameters(
        open='<｜DSML｜parameter name="',
        middle='" string="false">',
        text_middle='" string="true">',
        close="</｜DSML｜parameter>\n",
    ),
)
STEP3 = CallFormat(
    begin="<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>",
    open='<steptml:invoke name="',
    name_close='">\n',
    close="</steptml:invoke>",
    separator="<｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>",
    end="<｜tool_call_end｜>\n<｜tool_calls_end｜>",
    parameters=Parameters(
        open='<steptml:parameter name="', middle='">', close="</steptml:parameter>\n"
    ),
)

# Calls with literals, as in Python and as Gemma writes them

PYTHONIC = CallFormat(
    name_close="(",
    close=")",
    separator=", ",
    is_list=True,
    is_open_optional=True,
    parameters=Parameters(middle="=", separator=", ", quotes=('"', "'")),
)
GEMMA4 = CallFormat(
    open="<|tool_call>call:",
    name_close="{",
    close="}<tool_call|>",
    parameters=Parameters(
        middle=":", text_middle=':<|"|>', text_close='<|"|>', separator=",", quotes=('<|"|>', '"')
    ),
)
FUNCTION_GEMMA = replace(
    GEMMA4,
    open="<start_function_call>call:",
    close="}<end_function_call>",
    parameters=Parameters(
        middle=":",
        text_middle=":<escape>",
        text_close="<escape>",
        separator=",",
        quotes=("<escape>", '"'),
    ),
)

CALLS: Mapping[str, CallFormat] = {
    "hermes": HERMES,  # Hermes, Qwen2.5, Qwen3, SmolLM3, EXAONE 4
    "granite4": HERMES,
    "ernie45": HERMES,
    "longcat": replace(HERMES, open="<longcat_tool_call>\n", close="\n</longcat_tool_call>"),
    "llama3_json": LLAMA3,  # Llama 3.1, 3.2, 3.3
    "llama4_json": LLAMA3,
    "mistral": MISTRAL,  # the newer spelling is found in the chat template
    "granite": replace(MISTRAL, open="<|tool_call|>", id_length=0),  # Granite 3
    "granite-20b-fc": CallFormat(open="<function_call> ", separator="\n"),
    "phi4_mini_json": replace(MISTRAL, open="functools", id_length=0),  # Firefunction too
    "hunyuan_a13b": CallFormat(
        open="<tool_calls>", close="</tool_calls>", is_list=True, separator=", "
    ),
    "jamba": CallFormat(
        open="<tool_calls>\n", close="\n</tool_calls>", is_list=True, separator=",\n"
    ),
    "nemotron_json": CallFormat(
        open="<TOOLCALL>", close="</TOOLCALL>", is_list=True, separator=", "
    ),
    "minimax_m1": CallFormat(begin="<tool_calls>\n", separator="\n", end="\n</tool_calls>"),
    "xlam": CallFormat(
        begin="```json\n", end="\n```", is_list=True, is_open_optional=True, separator=", "
    ),
    "internlm": CallFormat(
        open="<|action_start|><|plugin|>\n",
        close="\n<|action_end|>",
        arguments="parameters",
        separator="\n",
    ),
    "apertus": CallFormat(
        open="<|tools_prefix|>", close="<|tools_suffix|>", name="", is_list=True, separator=", "
    ),
    "cohere_command3": COHERE,
    "cohere_command4": COHERE,
    "command_r": replace(COHERE, open="Action:\n```json\n", close="\n```"),  # Command R+
    "gigachat3": CallFormat(open="function call<|role_sep|>\n", separator="<|message_sep|>\n\n"),
    "gigachat31": CallFormat(open="<|function_call|>", separator="<|message_sep|>\n\n"),
    "deepseek_v3": DEEPSEEK_V3,  # DeepSeek R1 too
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
    "functionary_v31": CallFormat(open="<function=", name_close=">", close="</function>"),
    "glm4": CallFormat(name_close="\n", is_open_optional=True, separator="\n"),
    "openai": HARMONY,  # gpt-oss
    "qwen3_coder": QWEN3_CODER,  # Qwen3-Coder, Qwen3.5, Nemotron 3
    "qwen3_xml": QWEN3_CODER,
    "mimo": QWEN3_CODER,
    "step3p5": QWEN3_CODER,
    "step3": STEP3,
    "seed_oss": SEED_OSS,
    "glm45": GLM45,
    "glm47": GLM47,  # GLM 5 too
    "poolside_v1": GLM45,
    "hy_v3": HY_V3,
    "minimax_m2": MINIMAX_M2,
    "minicpm5": MINICPM5,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": replace(
        DEEPSEEK_V32, begin="<｜DSML｜tool_calls>\n", end="\n</｜DSML｜tool_calls>"
    ),
    "pythonic": PYTHONIC,
    "llama4_pythonic": replace(PYTHONIC, begin="<|python_start|>", end="<|python_end|>"),
    "lfm2": replace(
        PYTHONIC, begin="<|tool_call_start|>", end="<|tool_call_end|>", is_open_optional=False
    ),
    "olmo3": replace(
        PYTHONIC,
        begin="<function_calls>\n",
        separator="\n",
        end="\n</function_calls>",
        is_list=False,
        is_open_optional=False,
    ),
    "functiongemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4,
}
"""The formats of calls by the names of vLLM's parsers, and of other engines' where it has none."""

MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>",)),
    ("deepseek_v32", ("｜DSML｜", "function_calls")),
    ("deepseek_v4", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("hy_v3", ("<tool_sep", "<arg_key")),
    ("glm47", ("</arg_key><arg_value>",)),
    ("glm45", ("<arg_key>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("functionary_v31", ("<function=",)),
    ("minicpm5", ('<function name="',)),
    ("step3", ("steptml:invoke",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("List of tools: [",)),
    ("olmo3", ("<function_calls>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("command_r", ("json-formatted list of actions",)),
    ("internlm", ("<|plugin|>",)),
    ("gigachat31", ("<|function_call|>",)),
    ("gigachat3", ("function call", "<|role_sep|>")),
    ("longcat", ("<longcat_tool_call>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("granite-20b-fc", ("<function_call>",)),
    ("granite", ("<|tool_call|>",)),
    ("phi4_mini_json", ("functools",)),
    ("hunyuan_a13b", ("<tool_calls>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ')),
)
"""The texts in a chat template that show a format. The first one of them holds."""

THINK = Tags(open="<think>", close="</think>")
_COHERE = Tags(open="<|START_THINKING|>", close="<|END_THINKING|>")
REASONING: Mapping[str, Tags] = {
    "deepseek_r1": THINK,
    "deepseek_v3": THINK,
    "deepseek_v4": THINK,
    "ernie45": THINK,
    "glm45": THINK,
    "glm47": THINK,
    "holo2": THINK,
    "hunyuan_a13b": THINK,
    "hy_v3": THINK,
    "kimi_k2": THINK,
    "mimo": THINK,
    "minimax_m2": THINK,
    "nemotron_v3": THINK,
    "olmo3": THINK,
    "poolside_v1": THINK,
    "qwen3": THINK,
    "step3": THINK,
    "step3p5": THINK,
    "mistral": Tags(open="[THINK]", close="[/THINK]"),
    "granite": Tags(open="Here is my thought process:", close="Here is my response:"),
    "seed_oss": Tags(open="<seed:think>", close="</seed:think>"),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "gemma4": Tags(open="<|channel>thought\n", close="<channel|>"),
    "apertus": Tags(open="<|inner_prefix|>", close="<|inner_suffix|>"),
    "apriel": Tags(open="Here are my reasoning steps:", close="[BEGIN FINAL RESPONSE]"),
    "openai_gptoss": ANALYSIS,
}
"""The tags of reasoning by the names of vLLM's parsers, and of models where it has none."""

_USES_TOOLS = re.compile(r"\btools\b")


def call_format(
    parser: str,
    chat_template: str,
    response_template: Mapping[str, object] | None,
    family: FamilyFormats = NO_FORMATS,
) -> CallFormat:
    """Return how a model writes calls; ``parser`` is a name of `CALLS`, "hf" or "auto".

    "hf" is the model's response template. "auto" is the template too, or else the format with a tag
    in the chat template, or else the family's format. Where the template does not write tools, a
    message states the format, so it is Hermes' if there is no other.

    Raises:
        RequestError: the format is unknown, or the response template has something that is not
            supported.
    """
    if parser == "hf" or (parser == "auto" and response_template is not None):
        calls = calls_in(response_template)
        if calls is not None:
            return calls
        if parser == "hf":
            raise RequestError("tools: the model's response_template has no field tool_calls")
    if parser == "auto":
        other = "" if writes_tools(chat_template) else "hermes"
        parser = _shown_in(chat_template) or family.calls or other
    if not parser:
        raise RequestError(
            "tools: this model's calls have a format that is not known (set tool_call_parser to "
            f"{', '.join(CALLS)}, or to none, which reads no calls)"
        )
    if parser == "none":
        raise RequestError("tool_choice cannot force a call, because tool_call_parser is none")
    if parser == "mistral" and "[ARGS]" in chat_template:
        return MISTRAL_NAMED
    return CALLS[parser]


def reasoning_tags(
    parser: str,
    chat_template: str,
    response_template: Mapping[str, object] | None,
    family: FamilyFormats = NO_FORMATS,
) -> Tags | None:
    """Return the tags of a model's reasoning, or None if it is part of the text.

    ``parser`` is a name of `REASONING`, "hf", "auto" or "none". "hf" reads the response template.
    "auto" does so if its tags are literal, and otherwise finds tags in the chat template, or takes
    the family's tags.

    Raises:
        RequestError: the response template has no such tags, and the parser is "hf".
    """
    if parser == "hf":
        return reasoning_in(response_template)
    if parser != "auto":
        return None if parser == "none" else REASONING[parser]
    if response_template is not None:
        with suppress(RequestError):
            return reasoning_in(response_template)
    if writes_channels(chat_template):
        return ANALYSIS
    for tags in REASONING.values():
        if tags != ANALYSIS and tags.close in chat_template:
            return tags
    return None if family.reasoning is None else REASONING[family.reasoning]


def writes_tools(chat_template: str) -> bool:
    """Return whether a chat template writes tools, in one way or another."""
    return _USES_TOOLS.search(chat_template) is not None or writes_channels(chat_template)


def writes_channels(chat_template: str) -> bool:
    """Return whether a chat template writes harmony's messages."""
    return "<|channel|>" in chat_template


def _shown_in(chat_template: str) -> str | None:
    """Return the name of the format that a chat template shows to the model."""
    for name, marks in MARKS:
        if all(mark in chat_template for mark in marks):
            return name
    return None
