"""Anthropic's Messages API, with Anthropic's own client and without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lazy_module import lazy_module

from mie import LLM, CompletionOutput, SamplingParams
from mie.serve.errors import ApiError, anthropic_body, refuse_unfinished

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = lazy_module("anthropic")

USER = {"role": "user", "content": "Tell me a story about an otter."}


def create(claude: anthropic.Anthropic, **more: Any) -> anthropic.types.Message:
    """A greedy answer. The newest clients know no ``temperature``, which is therefore extra."""
    extra = {"temperature": 0, **more.pop("extra_body", {})}
    arguments = {"model": "bundled", "max_tokens": 24, "messages": [USER], **more}
    return claude.messages.create(**arguments, extra_body=extra)


def expected(llm: LLM, messages: list[dict[str, str]], **options: Any) -> Any:
    """The engine's greedy answer to a conversation."""
    params = SamplingParams(temperature=0, max_tokens=24, **options)
    [output] = llm.chat(messages, params, use_tqdm=False)
    return output


def test_an_answer_is_the_engines(claude: anthropic.Anthropic, llm: LLM):
    message = create(claude)
    output = expected(llm, [USER])
    [block] = message.content
    assert (block.type, block.text) == ("text", output.outputs[0].text)
    assert (message.type, message.role, message.model) == ("message", "assistant", "bundled")
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    assert usage.input_tokens + cached == len(output.prompt_token_ids)
    assert usage.output_tokens == 24


def test_the_system_prompt_is_the_first_message(claude: anthropic.Anthropic, llm: LLM):
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        output = expected(llm, [{"role": "system", "content": "Be brief."}, USER])
        assert create(claude, system=system).content[0].text == output.outputs[0].text


def test_blocks_of_text_and_turns_of_one_role_are_joined(claude: anthropic.Anthropic, llm: LLM):
    blocks = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}]
    cached = [{**blocks[0], "cache_control": {"type": "ephemeral"}}, blocks[1]]
    turns = [{"role": "user", "content": "Tell me"}, {"role": "user", "content": "a story."}]
    output = expected(llm, [{"role": "user", "content": "Tell me\na story."}])
    for messages in (
        [{"role": "user", "content": blocks}],
        [{"role": "user", "content": cached}],
        turns,
    ):
        assert create(claude, messages=messages).content[0].text == output.outputs[0].text


def test_the_answer_continues_a_last_turn_of_the_assistant(claude: anthropic.Anthropic, llm: LLM):
    messages = [USER, {"role": "assistant", "content": "Once there was an"}]
    params = SamplingParams(temperature=0, max_tokens=24)
    [output] = llm.chat(
        messages, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert create(claude, messages=messages).content[0].text == output.outputs[0].text


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic):
    text = create(claude).content[0].text
    word = text.split()[3]
    message = create(claude, stop_sequences=["never seen", word])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert message.content[0].text == text[: text.index(word)]


def test_a_stream_has_anthropics_events_in_their_order(claude: anthropic.Anthropic):
    whole = create(claude)
    events = list(create(claude, stream=True))
    kinds = [event.type for event in events]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(deltas) == whole.content[0].text
    assert all(deltas)
    start, end = events[0], events[-2]
    assert start.message.content == []
    assert start.message.stop_reason is None
    assert end.delta.stop_reason == whole.stop_reason
    assert end.usage.output_tokens == whole.usage.output_tokens
    total = start.message.usage.input_tokens + start.message.usage.cache_read_input_tokens
    assert total == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_tokens_are_counted_as_the_prompt_has_them(claude: anthropic.Anthropic):
    for more in ({}, {"system": "Be brief."}):
        count = claude.messages.count_tokens(model="bundled", messages=[USER], **more)
        usage = create(claude, **more).usage
        assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_reach_the_client_as_its_own_exceptions(claude: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError) as not_found:
        create(claude, model="another")
    assert not_found.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="inference_geo is not supported"):
        create(claude, inference_geo="us")


def test_a_broken_body_and_an_unknown_route_have_the_shape_too(server: Any):
    headers = {"content-type": "application/json"}
    broken = server.client.post("/v1/messages", content=b"{", headers=headers)
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
    nowhere = server.client.post("/v1/messages/nowhere", json={})
    assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")


def test_an_answer_that_was_aborted_is_no_answer():
    with pytest.raises(ApiError, match="ended the request before") as refused:
        refuse_unfinished(CompletionOutput(index=0, text="Once", finish_reason="abort"))
    assert anthropic_body(refused.value)["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_every_status_has_anthropics_type(status: int, kind: str):
    body = anthropic_body(ApiError(status, "so it is"))
    assert body == {"type": "error", "error": {"type": kind, "message": "so it is"}}
