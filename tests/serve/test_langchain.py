"""LangChain's structured outputs and tools, where langchain-openai is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from live_server import live_bundled
from pydantic import BaseModel, Field

langchain_openai = pytest.importorskip(
    "langchain_openai", reason="langchain-openai is not installed (pip install langchain-openai)"
)
pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")


class Record(BaseModel):
    """A record of a story."""

    animal: Literal["fox", "otter", "owl"]
    age: int = Field(ge=1, le=99)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with live_bundled(num_blocks=256) as url:
        yield langchain_openai.ChatOpenAI(
            base_url=f"{url}/v1", api_key="x", model="bundled", max_tokens=200, temperature=0
        )


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_output_is_a_record(model: Any, method: str):
    record = model.with_structured_output(Record, method=method).invoke("Tell me a story.")
    assert isinstance(record, Record)


def test_a_bound_tool_is_called(model: Any):
    message = model.bind_tools([Record], tool_choice="any").invoke("Tell me a story.")
    assert message.tool_calls
    for call in message.tool_calls:
        Record(**call["args"])
    chunks = list(model.bind_tools([Record], tool_choice="Record").stream("Tell me a story."))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    [call] = total.tool_calls
    assert call["name"] == "Record"
    Record(**call["args"])
