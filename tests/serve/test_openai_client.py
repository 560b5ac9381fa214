"""OpenAI's own client: responses, whole and streamed, and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lazy_module import lazy_module

if TYPE_CHECKING:
    import openai
else:
    openai = lazy_module("openai")

PROMPT = "Once upon a time there was an otter"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about an otter."}]
GREEDY: dict[str, Any] = {"model": "bundled", "temperature": 0}


# Responses


def test_a_response_is_the_chats_answer(client: openai.OpenAI):
    chat = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=20)
    for given in (MESSAGES[0]["content"], MESSAGES):
        response = client.responses.create(**GREEDY, input=given, max_output_tokens=20)
        assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.object) == ("incomplete", "response")
    assert [item.status for item in response.output] == ["incomplete"]
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


# Errors


def test_errors_have_the_clients_own_classes(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=-2)
    assert (refused.value.type, refused.value.param) == ("invalid_request_error", "max_tokens")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
