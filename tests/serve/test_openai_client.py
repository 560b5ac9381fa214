"""OpenAI's own client: every endpoint, whole and streamed, raw and parsed, sync and async."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from lazy_module import lazy_module
from live_server import INVARIANT, live

from mie import LLM, AsyncLLM, SamplingParams

if TYPE_CHECKING:
    import openai
else:
    openai = lazy_module("openai")

PROMPT = "Once upon a time there was an otter"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about an otter."}]
GREEDY: dict[str, Any] = {"model": "bundled", "temperature": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("bundled", **INVARIANT)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def url(engine: AsyncLLM) -> Iterator[str]:
    with live(engine) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def offline() -> LLM:
    """The same model without a server."""
    return LLM("bundled", **INVARIANT)


# Completions


def test_a_completion_is_the_engines(client: openai.OpenAI, offline: LLM):
    completion = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=20)
    params = SamplingParams(temperature=0, max_tokens=20)
    [output] = offline.generate(PROMPT, params, use_tqdm=False)
    [choice] = completion.choices
    assert choice.text == output.outputs[0].text
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (completion.object, completion.model) == ("text_completion", "bundled")
    usage = completion.usage
    assert usage is not None
    assert usage.prompt_tokens == len(output.prompt_token_ids)
    assert (usage.completion_tokens, usage.total_tokens) == (20, usage.prompt_tokens + 20)


def test_several_prompts_of_every_form(client: openai.OpenAI, offline: LLM):
    ids = offline.get_tokenizer().encode(PROMPT)
    [text] = [
        choice.text
        for choice in client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=6).choices
    ]
    for prompt in (ids, [PROMPT, PROMPT], [ids, ids]):
        completion = client.completions.create(**GREEDY, prompt=prompt, max_tokens=6)
        assert {choice.text for choice in completion.choices} == {text}
        assert [choice.index for choice in completion.choices] == [*range(len(completion.choices))]


def test_seeded_choices_are_the_engines(client: openai.OpenAI, offline: LLM):
    completion = client.completions.create(
        model="bundled", prompt=PROMPT, max_tokens=12, n=3, seed=5, temperature=1.2
    )
    params = SamplingParams(n=3, seed=5, temperature=1.2, max_tokens=12)
    [output] = offline.generate(PROMPT, params, use_tqdm=False)
    assert [c.text for c in completion.choices] == [c.text for c in output.outputs]


def test_log_probabilities_are_the_engines(client: openai.OpenAI, offline: LLM):
    completion = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=5, logprobs=2)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    [output] = offline.generate(PROMPT, params, use_tqdm=False)
    expected = output.outputs[0]
    found = completion.choices[0].logprobs
    assert found is not None
    assert expected.logprobs is not None
    pairs = zip(expected.token_ids, expected.logprobs, strict=True)
    assert found.token_logprobs == pytest.approx([row[token].logprob for token, row in pairs])
    assert "".join(found.tokens or ()) == completion.choices[0].text
    assert found.text_offset is not None
    assert found.text_offset[0] == 0


def test_echo_scores_a_given_text(client: openai.OpenAI, offline: LLM):
    """What evaluation harnesses send."""
    completion = client.completions.create(
        model="bundled", prompt=PROMPT, max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    [output] = offline.generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), use_tqdm=False
    )
    found = completion.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert output.prompt_logprobs is not None
    assert found.token_logprobs[0] is None
    rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    expected = [row[token].logprob for token, row in rows if row]
    assert found.token_logprobs[1:-1] == pytest.approx(expected)
    assert completion.choices[0].text.startswith(PROMPT)


def test_a_streamed_completion_is_the_whole_one(client: openai.OpenAI):
    whole = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=20)
    stream = client.completions.create(
        **GREEDY,
        prompt=PROMPT,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert counts(last.usage) == counts(whole.usage)
    assert len({chunk.id for chunk in (*chunks, last)}) == 1


def counts(usage: openai.types.CompletionUsage | None) -> tuple[int, int, int]:
    """The three counts, which do not depend on the cache."""
    assert usage is not None
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


# Chats


def test_a_chat_is_the_engines(client: openai.OpenAI, offline: LLM):
    chat = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=20)
    params = SamplingParams(temperature=0, max_tokens=20)
    [output] = offline.chat(MESSAGES, params, use_tqdm=False)
    [choice] = chat.choices
    assert choice.message.content == output.outputs[0].text
    assert (choice.message.role, choice.message.refusal) == ("assistant", None)
    assert (choice.finish_reason, chat.object) == ("length", "chat.completion")


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI):
    whole = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_completion_tokens=20)
    stream = client.chat.completions.create(
        **GREEDY,
        messages=MESSAGES,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, *chunks, last = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in chunks)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert counts(last.usage) == counts(whole.usage)


def test_the_chat_stream_helper_accumulates_the_answer(client: openai.OpenAI):
    """It refuses an answer that ends at a limit, so this one has none."""
    whole = client.chat.completions.create(**GREEDY, messages=MESSAGES)
    with client.chat.completions.stream(**GREEDY, messages=MESSAGES) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_chat_log_probabilities_spell_the_answer(client: openai.OpenAI):
    chat = client.chat.completions.create(
        **GREEDY, messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    entries = logprobs.content or []
    assert len(entries) == 8
    data = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert data.decode() == chat.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy


# Responses


def test_a_response_is_the_chats_answer(client: openai.OpenAI):
    chat = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=20)
    for given in (MESSAGES[0]["content"], MESSAGES):
        response = client.responses.create(**GREEDY, input=given, max_output_tokens=20)
        assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.object) == ("incomplete", "response")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.id.startswith("resp_")
    assert response.store is False
    usage = response.usage
    assert usage is not None
    assert chat.usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, 20)
    assert usage.input_tokens_details.cached_tokens > 0
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_a_whole_response_is_completed(client: openai.OpenAI):
    response = client.responses.create(**GREEDY, input="Hello")
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert [item.type for item in response.output] == ["message"]


def test_instructions_are_a_system_message(client: openai.OpenAI):
    system = {"role": "system", "content": "Be brief."}
    chat = client.chat.completions.create(**GREEDY, messages=[system, *MESSAGES], max_tokens=20)
    response = client.responses.create(
        **GREEDY, instructions="Be brief.", input=MESSAGES, max_output_tokens=20
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.instructions == "Be brief."


def test_the_output_of_a_response_may_be_input_of_the_next(client: openai.OpenAI):
    first = client.responses.create(**GREEDY, input=MESSAGES, max_output_tokens=20)
    more = {"role": "user", "content": "And then?"}
    conversation: Any = [*MESSAGES, *(item.model_dump() for item in first.output), more]
    second = client.responses.create(**GREEDY, input=conversation, max_output_tokens=20)
    answer = {"role": "assistant", "content": first.output_text}
    chat = client.chat.completions.create(
        **GREEDY, messages=[*MESSAGES, answer, more], max_tokens=20
    )
    assert second.output_text == chat.choices[0].message.content


def test_a_streamed_response_has_openais_events_in_their_order(client: openai.OpenAI):
    whole = client.responses.create(**GREEDY, input=MESSAGES, max_output_tokens=20)
    events = list(
        client.responses.create(**GREEDY, input=MESSAGES, max_output_tokens=20, stream=True)
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert "".join(deltas) == whole.output_text
    assert events[0].response.status == "in_progress"
    assert events[-1].response.output_text == whole.output_text


def test_the_response_stream_helper_has_log_probabilities(client: openai.OpenAI):
    """It refuses an answer that ends at a limit, so this one has none."""
    with client.responses.stream(
        **GREEDY, input="Hello", include=["message.output_text.logprobs"], top_logprobs=2
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    part = final.output[0].content[0]
    assert len(part.logprobs) == final.usage.output_tokens
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).startswith(part.text.encode())
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


RESPONSES_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "store": ({"store": True}, "store"),
    "a previous response": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "background": ({"background": True}, "background"),
    "tools": ({"tools": [{"type": "web_search"}]}, "tools"),
    "reasoning": ({"reasoning": {"effort": "high"}}, "reasoning"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "a schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text",
    ),
    "a call": ({"input": [{"type": "web_search_call", "id": "1"}]}, "input"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        None,
    ),
    "no input": ({"input": []}, "input"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "another include": ({"include": ["reasoning.encrypted_content"]}, "include"),
}


@pytest.mark.parametrize(("change", "param"), RESPONSES_REFUSED.values(), ids=RESPONSES_REFUSED)
def test_what_responses_cannot_do_is_refused_by_name(
    client: openai.OpenAI, change: dict[str, Any], param: str | None
):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{**GREEDY, "input": "x", "max_output_tokens": 2, **change})
    if param is not None:
        assert refused.value.param == param


def test_what_changes_nothing_is_accepted(client: openai.OpenAI):
    response = client.responses.create(
        **GREEDY,
        input="x",
        max_output_tokens=2,
        store=False,
        metadata={"a": "b"},
        user="somebody",
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        truncation="disabled",
        text={"format": {"type": "text"}},
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
    )
    assert response.metadata == {"a": "b"}


# Models


def test_models_are_listed_and_retrieved(client: openai.OpenAI):
    [model] = client.models.list().data
    assert (model.id, model.object) == ("bundled", "model")
    assert client.models.retrieve("bundled") == model
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("another")
    assert missing.value.code == "model_not_found"


# Raw responses, async, errors, timeouts, retries


def test_raw_responses_have_headers_and_parse(client: openai.OpenAI):
    for endpoint, arguments in (
        (client.completions, {"prompt": PROMPT, "max_tokens": 4}),
        (client.chat.completions, {"messages": MESSAGES, "max_tokens": 4}),
        (client.responses, {"input": "Hello", "max_output_tokens": 4}),
    ):
        raw = endpoint.with_raw_response.create(**GREEDY, **arguments)
        assert raw.headers["content-type"] == "application/json"
        assert raw.parse().id == json.loads(raw.text)["id"]


def test_a_raw_stream_is_server_sent_events(client: openai.OpenAI):
    with client.completions.with_streaming_response.create(
        **GREEDY, prompt=PROMPT, max_tokens=4, stream=True
    ) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_the_async_client_gets_the_same(url: str, client: openai.OpenAI):
    async def main() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url, api_key="x") as asynchronous:
            completion = asynchronous.completions.create(**GREEDY, prompt=PROMPT, max_tokens=9)
            chat = asynchronous.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=9)
            response = asynchronous.responses.create(**GREEDY, input=MESSAGES, max_output_tokens=9)
            first, second, third = await asyncio.gather(completion, chat, response)
            stream = await asynchronous.chat.completions.create(
                **GREEDY, messages=MESSAGES, max_tokens=9, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return [
                first.choices[0].text,
                second.choices[0].message.content,
                third.output_text,
                "".join(pieces),
            ]

    completion = client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=9)
    chat = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=9)
    answer = chat.choices[0].message.content
    assert asyncio.run(main()) == [completion.choices[0].text, answer, answer, answer]


def test_errors_have_the_clients_own_classes(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=-1)
    assert (refused.value.type, refused.value.param) == ("invalid_request_error", "max_tokens")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert missing.value.code == "model_not_found"


@contextmanager
def held(engine: AsyncLLM) -> Iterator[None]:
    """Keep the engine from stepping."""
    release, is_held = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        release.wait(60)

    thread = threading.Thread(target=lambda: asyncio.run(engine._loop.call_async(hold)))
    thread.start()
    try:
        assert is_held.wait(60)
        yield
    finally:
        release.set()
        thread.join()


def test_a_timeout_is_the_clients_own_and_is_retried(engine: AsyncLLM, url: str):
    sent: list[httpx2.Request] = []
    with (
        httpx2.Client(event_hooks={"request": [sent.append]}) as http_client,
        openai.OpenAI(
            base_url=url, api_key="x", timeout=0.05, max_retries=2, http_client=http_client
        ) as client,
    ):
        with held(engine), pytest.raises(openai.APITimeoutError):
            client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=4)
        assert len(sent) == 3
        patient = client.with_options(timeout=60)
        assert patient.completions.create(**GREEDY, prompt=PROMPT, max_tokens=4).choices[0].text
    assert blocks_in_use(engine) == 0


def blocks_in_use(engine: AsyncLLM) -> int:
    """The blocks that requests hold, between two steps."""

    async def ask() -> int:
        manager = engine._loop.engine.scheduler.manager
        return await engine._loop.call_async(lambda: manager.num_used)

    return asyncio.run(ask())
