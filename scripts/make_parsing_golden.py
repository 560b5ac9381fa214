"""Make tests/data/answers.json: answers with reasoning and calls, as transformers reads them.

    pip install "transformers>=5.23"
    python scripts/make_parsing_golden.py

Each format of mie is written as a response template, and each text is parsed with it. PyTorch is
not needed.
"""

import datetime
import json
import platform
from pathlib import Path
from typing import Any

import transformers
from transformers.utils.chat_parsing import parse_response

OUTPUT = Path(__file__).parents[1] / "tests/data/answers.json"
THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
CALL = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def template(**tool_calls: Any) -> dict[str, Any]:
    """Return a response template whose calls are JSON."""
    fields = {
        "thinking": THINKING,
        "tool_calls": {"content": "json", **tool_calls},
        "content": {"close": "<|im_end|>", "content": "text"},
    }
    return {"version": 1, "start_anchor": "<|im_start|>assistant\n", "fields": fields}


def keys_of(name: str, arguments: str) -> dict[str, Any]:
    """Return the transform of calls with other keys."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


EACH = keys_of("{name}", "{arguments}")
TAGS = {"open": "<tool_call>", "close": "</tool_call>"}
TEMPLATES = {
    "hermes": template(**TAGS, repeats=True, transform=CALL),
    "llama3_json": template(
        open_pattern=r"(?:<\|python_tag\|>|; )?(?=\{\"name\")",
        close_pattern=r"(?=; \{)|$",
        repeats=True,
        transform=keys_of("{content.name}", "{content.parameters}"),
    ),
    "mistral": template(
        open="[TOOL_CALLS]",
        transform_each=True,
        transform=EACH,
    ),
    "mistral [ARGS]": template(
        open_pattern=r"\[TOOL_CALLS\](?P<name>[\w.-]+)\[ARGS\]",
        close_pattern=r"(?=\[TOOL_CALLS\])|$",
        repeats=True,
        transform=NAMED,
    ),
    "granite": template(open="<|tool_call|>", transform_each=True, transform=EACH),
    "phi4_mini_json": template(open="functools", transform_each=True, transform=EACH),
    "hunyuan_a13b": template(
        open="<tool_calls>", close="</tool_calls>", transform_each=True, transform=EACH
    ),
    "cohere": template(
        open="<|START_ACTION|>",
        close="<|END_ACTION|>",
        transform_each=True,
        transform=keys_of("{tool_name}", "{parameters}"),
    ),
}
ONE = '{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2], "note": "a \\"b\\" {"}}'
TWO = '{"name": "add", "arguments": {"a": -1.5e3, "b": {"c": null}}}'
TEXTS = {
    "hermes": [
        f"<tool_call>\n{ONE}\n</tool_call>",
        f"<tool_call>{ONE}</tool_call>",
        f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>\n",
        f"I look it up.\n\n<tool_call>\n{ONE}\n</tool_call>",
        f"<think>\nHm, \n so.\n</think>\n\n<tool_call>\n{TWO}\n</tool_call>",
        f"<tool_call>\n{ONE}",
        "<think>Easy.</think>\n\nIt is 4.",
        "It is 4.",
        "  2 < 3, and <tool is no tag. ",
    ],
    "llama3_json": [
        ONE.replace("arguments", "parameters"),
        f"<|python_tag|>{TWO.replace('arguments', 'parameters')}",
        f"{ONE}; {TWO}".replace("arguments", "parameters"),
        "It is 4.",
    ],
    "mistral": [f"[TOOL_CALLS][{ONE}]", f"[TOOL_CALLS] [{ONE}, {TWO}]", "It is [4]."],
    "mistral [ARGS]": [
        '[TOOL_CALLS]add[ARGS]{"a": 1}',
        'So: [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
    ],
    "granite": [f"<|tool_call|>[{ONE}]", f"<|tool_call|> [{ONE}, {TWO}]", "It is [4]."],
    "phi4_mini_json": [f"functools[{ONE}]", f"functools[{TWO}, {ONE}]", "It is 4."],
    "hunyuan_a13b": [
        f"<tool_calls>[{ONE}, {TWO}]</tool_calls>",
        f"<think>\nSo.\n</think>\n<tool_calls>\n[{TWO}]\n</tool_calls>",
        "It is 4.",
    ],
    "cohere": [
        '<think>So.</think><|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "add", '
        '"parameters": {"a": 1}},\n  {"tool_name": "weather", "parameters": {}}\n]<|END_ACTION|>'
    ],
}


def main() -> None:
    """Parse every text, and write the messages."""
    cases = [
        {"format": name, "text": text, "message": parse_response(text, TEMPLATES[name], prefix="")}
        for name, texts in TEXTS.items()
        for text in texts
    ]
    made = {
        "by": "scripts/make_parsing_golden.py",
        "on": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "transformers": transformers.__version__,
    }
    content = {"provenance": made, "templates": TEMPLATES, "cases": cases}
    OUTPUT.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
