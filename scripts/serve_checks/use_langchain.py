"""Chat through langchain-openai: whole, streamed, in a batch, with schemas and with tools.

python use_langchain.py URL KEY
"""

import asyncio
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

url, key = sys.argv[1:]
model = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model="bundled", temperature=0, max_tokens=16)
messages = [SystemMessage("Be brief."), HumanMessage("Tell me a story about an otter.")]

whole = model.invoke(messages)
assert whole.content
assert whole.usage_metadata["output_tokens"] == 16
assert whole.response_metadata["finish_reason"] == "length"

chunks = list(model.stream(messages, stream_usage=True))
total = chunks[0]
for chunk in chunks[1:]:
    total += chunk
assert total.content == whole.content
assert total.usage_metadata["output_tokens"] == 16
assert len(chunks) > 3

batch = model.batch([messages] * 5)
assert {each.content for each in batch} == {whole.content}


async def main() -> None:
    assert (await model.ainvoke(messages)).content == whole.content
    pieces = [chunk.content async for chunk in model.astream(messages)]
    assert "".join(pieces) == whole.content


asyncio.run(main())

logprobs = model.bind(logprobs=True, top_logprobs=2).invoke(messages)
assert len(logprobs.response_metadata["logprobs"]["content"]) == 16

responses = ChatOpenAI(
    base_url=f"{url}/v1",
    api_key=key,
    model="bundled",
    temperature=0,
    max_tokens=16,
    use_responses_api=True,
)
assert responses.invoke(messages).text == whole.content

completion = OpenAI(
    base_url=f"{url}/v1", api_key=key, model="bundled", temperature=0, max_tokens=16
)
text = completion.invoke("Once upon a time")
assert "".join(completion.stream("Once upon a time")) == text


class Record(BaseModel):
    """A record of a story."""

    animal: Literal["fox", "otter", "owl"]
    age: int = Field(ge=1, le=99)


roomy = ChatOpenAI(
    base_url=f"{url}/v1", api_key=key, model="bundled", temperature=0, max_tokens=200
)
for method in ("json_schema", "function_calling"):
    record = roomy.with_structured_output(Record, method=method).invoke(messages)
    assert isinstance(record, Record)
called = roomy.bind_tools([Record], tool_choice="any").invoke(messages)
assert called.tool_calls
for call in called.tool_calls:
    Record(**call["args"])
