"""Use structured outputs and tools through LangChain's clients, streamed and whole.

    pip install langchain-openai langchain-anthropic
    mie serve bundled --port 8000
    python scripts/langchain_check.py [--url http://127.0.0.1:8000] [--model bundled]

Both clients must return the same answer streamed and whole, and each answer must follow its schema.
The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, custom_tool
from pydantic import BaseModel

QUESTION = "How is the weather at the mill by the sea?"
PATTERN = r"[0-9]{1,3}( \+ [0-9]{1,3}){1,3}"


class Weather(BaseModel):
    """The weather at a place."""

    place: Literal["lake", "mill", "sea"]
    degrees: Literal[-5, 10, 25]
    is_windy: bool


class Walk(BaseModel):
    """A walk from a place to another place."""

    start: Literal["lake", "mill"]
    end: Literal["sea"]


@custom_tool(format={"type": "grammar", "syntax": "regex", "definition": PATTERN})
def add(text: str) -> int:
    """Add some numbers."""
    return sum(int(each) for each in text.split(" + "))


TOOLS: dict[str, type[BaseModel]] = {"Weather": Weather, "Walk": Walk}


def joined(chunks: Iterator[Any]) -> Any:
    """Return the sum of the chunks of a stream."""
    return sum(chunks, next(chunks))


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """Return names and arguments of a message's calls."""
    return [(call["name"], call["args"]) for call in message.tool_calls]


def check_calls(model: Any, num: int | None = None, name: str | None = None) -> None:
    """Check that calls are equal streamed and whole, and that arguments fit the tool's schema."""
    whole = calls_of(model.invoke(QUESTION))
    streamed = calls_of(joined(model.stream(QUESTION)))
    assert whole == streamed, (whole, streamed)
    assert whole if num is None else len(whole) == num, whole
    for called, arguments in whole:
        TOOLS[called].model_validate(arguments)
        assert name is None or called == name, called


def check_structured(model: Any) -> None:
    """Check that a structured answer is equal streamed and whole, and follows the schema."""
    whole = model.invoke(QUESTION)
    *_, streamed = model.stream(QUESTION)
    for answer in (whole, streamed):
        Weather.model_validate(answer.model_dump() if isinstance(answer, BaseModel) else answer)
    assert whole == streamed, (whole, streamed)


def check_json_mode(model: Any) -> None:
    """Check that JSON mode returns an object."""
    text = model.bind(response_format={"type": "json_object"}).invoke(QUESTION).content
    assert isinstance(json.loads(text), dict), text


def check_custom(model: Any) -> None:
    """Check that the text of a custom tool follows the grammar, streamed and whole."""
    bound = model.bind_tools([add], tool_choice={"type": "custom", "name": "add"})
    texts = []
    for message in (bound.invoke(QUESTION), joined(bound.stream(QUESTION))):
        [(name, arguments)] = calls_of(message)
        assert name == "add"
        texts.append(arguments["__arg1"])
        assert re.fullmatch(PATTERN, texts[-1]), texts
    assert texts[0] == texts[1], texts


def check_result(model: Any, **options: Any) -> None:
    """Check that the prompt of the next turn has the call and the result of the tool."""
    bound = model.bind_tools([Weather], **options)
    called = bound.invoke(QUESTION)
    result = {"role": "tool", "content": "windy", "tool_call_id": called.tool_calls[0]["id"]}
    answer = model.invoke([{"role": "user", "content": QUESTION}, called, result])
    before, after = (each.usage_metadata["input_tokens"] for each in (called, answer))
    assert after > before, (before, after)


def checks(url: str, name: str, key: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the checks by name."""
    common: dict[str, Any] = {"model": name, "api_key": key, "max_retries": 0, "timeout": 300}
    openai = ChatOpenAI(base_url=f"{url}/v1", temperature=0, max_tokens=400, **common)
    responses = ChatOpenAI(
        base_url=f"{url}/v1", temperature=0, max_tokens=400, use_responses_api=True, **common
    )
    claude = ChatAnthropic(base_url=url, temperature=0, max_tokens=400, **common)
    both = [Weather, Walk]
    for form, model in {"chat": openai, "responses": responses}.items():
        for method in ("json_schema", "function_calling"):
            structured = model.with_structured_output(Weather, method=method)
            yield f"{form}, {method}", partial(check_structured, structured)
        tool = model.bind_tools(both, tool_choice="Walk")
        yield f"{form}, a tool by name", partial(check_calls, tool, 1, "Walk")
        several = model.bind_tools(both, tool_choice="required", strict=True)
        yield f"{form}, strict tools", partial(check_calls, several)
        one = model.bind_tools(both, tool_choice="any", parallel_tool_calls=False)
        yield f"{form}, at most one call", partial(check_calls, one, 1)
        yield f"{form}, a result", partial(check_result, model, tool_choice="required")
    yield "chat, JSON mode", partial(check_json_mode, openai)
    yield "responses, a custom tool", partial(check_custom, responses)
    structured = claude.with_structured_output(Weather)
    yield "messages, structured output", partial(check_structured, structured)
    structured = claude.with_structured_output(Weather, method="json_schema")
    yield "messages, json_schema", partial(check_structured, structured)
    tool = claude.bind_tools(both, tool_choice="Walk")
    yield "messages, a tool by name", partial(check_calls, tool, None, "Walk")
    several = claude.bind_tools(both, tool_choice="any")
    yield "messages, any tool", partial(check_calls, several)
    one = claude.bind_tools(both, tool_choice="any", parallel_tool_calls=False)
    yield "messages, at most one call", partial(check_calls, one, 1)
    yield "messages, a result", partial(check_result, claude, tool_choice="any")


def main() -> int:
    """Run the checks, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--key", default="none")
    args = parser.parse_args()
    failed = 0
    for name, check in checks(args.url, args.model, args.key):
        try:
            check()
        except Exception as error:  # the others still run
            failed += 1
            print(f"{name}: {type(error).__name__}: {str(error)[:500]}")
        else:
            print(f"{name}: right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
