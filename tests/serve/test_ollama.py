"""Ollama's interface, with Ollama's own client and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from lazy_module import lazy_module
from live_server import live
from scripted_answers import answering

from mie import LLM, AsyncLLM, SamplingParams
from mie.serve.config import ServeConfig

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

if TYPE_CHECKING:
    import ollama
else:
    ollama = lazy_module("ollama")

USER = {"role": "user", "content": "Tell me a story about an otter."}
GREEDY = {"temperature": 0, "num_predict": 24}
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["lake", "mill"]}},
    "required": ["place"],
    "additionalProperties": False,
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url)
    yield client
    client.close()


def greedy(llm: LLM, messages: list[dict[str, str]], max_tokens: int = 24) -> Any:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    [output] = llm.chat(messages, params, use_tqdm=False)
    return output


def test_a_chat_is_the_engines_answer(client: ollama.Client, llm: LLM):
    expected = greedy(llm, [USER])
    answer = client.chat("bundled", [USER], options=GREEDY)
    assert (answer.message.role, answer.message.content) == ("assistant", expected.outputs[0].text)
    assert (answer.model, answer.done, answer.done_reason) == ("bundled", True, "length")
    assert answer.prompt_eval_count == len(expected.prompt_token_ids)
    assert answer.eval_count == 24
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 0
    assert answer.load_duration == 0


def test_a_stream_has_the_same_text_and_ends_with_the_counts(client: ollama.Client):
    whole = client.chat("bundled", [USER], options=GREEDY)
    *lines, last = client.chat("bundled", [USER], options=GREEDY, stream=True)
    assert "".join(line.message.content for line in lines) == whole.message.content
    assert lines
    assert not any(line.done for line in lines)
    assert all(line.eval_count is None for line in lines)
    assert (last.message.content, last.done, last.done_reason) == ("", True, "length")
    assert (last.eval_count, last.prompt_eval_count) == (24, whole.prompt_eval_count)


def test_lines_are_the_default(server: Any):
    answer = server.post("/api/chat", messages=[USER], options=GREEDY)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_generate_writes_the_template_and_raw_leaves_it_out(client: ollama.Client, llm: LLM):
    system = {"role": "system", "content": "Be brief."}
    expected = greedy(llm, [system, USER])
    asked = {"model": "bundled", "prompt": USER["content"], "options": GREEDY}
    answer = client.generate(**asked, system="Be brief.")
    assert answer.response == expected.outputs[0].text
    assert answer.prompt_eval_count == len(expected.prompt_token_ids)
    *lines, last = client.generate(**asked, system="Be brief.", stream=True)
    assert "".join(line.response for line in lines) == answer.response
    assert (last.response, last.done, last.eval_count) == ("", True, 24)
    params = SamplingParams(temperature=0, max_tokens=24)
    [expected] = llm.generate([USER["content"]], params, use_tqdm=False)
    answer = client.generate(**asked, raw=True)
    assert answer.response == expected.outputs[0].text
    assert answer.prompt_eval_count == len(expected.prompt_token_ids)


def test_an_answer_continues_a_last_turn_of_the_assistant(client: ollama.Client, llm: LLM):
    messages = [USER, {"role": "assistant", "content": "Once there was an"}]
    params = SamplingParams(temperature=0, max_tokens=24)
    more = {"add_generation_prompt": False, "continue_final_message": True}
    [expected] = llm.chat(messages, params, use_tqdm=False, **more)
    answer = client.chat("bundled", messages, options=GREEDY)
    assert answer.message.content == expected.outputs[0].text


def test_nothing_to_answer_loads_the_model(client: ollama.Client):
    answers = client.chat("bundled", []), client.generate("bundled"), client.generate("bundled", "")
    assert [(each.done, each.done_reason) for each in answers] == [(True, "load")] * 3
    assert answers[0].message.content == answers[1].response == ""
    with pytest.raises(ollama.ResponseError, match="keep_alive is not supported"):
        client.generate("bundled", keep_alive=0)
    with pytest.raises(ollama.ResponseError, match="top_logprobs asks for 21; the limit is 20"):
        client.generate("bundled", top_logprobs=21)


def test_the_options_have_the_effect_of_the_parameters(server: Any):
    asked = {"model": "bundled", "max_tokens": 24, "seed": 5}
    given = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "stop": [" the"]}
    given |= {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    expected = server.ask(
        "/v1/chat/completions", messages=[USER], **asked, **given, repetition_penalty=1.1
    )
    options = {**given, "num_predict": 24, "seed": 5, "repeat_penalty": 1.1, "num_thread": 4}
    answer = server.ask("/api/chat", messages=[USER], stream=False, options=options)
    [choice] = expected["choices"]
    assert answer["message"]["content"] == choice["message"]["content"]
    assert answer["eval_count"] == expected["usage"]["completion_tokens"]
    assert answer["done_reason"] == choice["finish_reason"] == "stop"


def test_without_a_limit_an_answer_fills_num_ctx(server: Any):
    asked = {"messages": [USER], "stream": False}
    options = {"num_ctx": 64, "temperature": 0, "stop": []}
    num_prompt = server.ask("/api/chat", **asked, options=options)["prompt_eval_count"]
    rest = 64 - num_prompt
    for num_predict in (-1, -2, 4000, None):
        given = {**options, "num_predict": num_predict}
        answer = server.ask("/api/chat", **asked, options=given)
        assert (answer["done_reason"], answer["eval_count"]) == ("length", rest)
    too_small = server.post("/api/chat", **asked, options={"num_ctx": num_prompt})
    assert too_small.status_code == 400
    assert f"the context holds {num_prompt} tokens" in too_small.json()["error"]


def test_a_format_constrains_the_answer(client: ollama.Client):
    options = {"seed": 1, "num_predict": 200}
    answer = client.chat("bundled", [USER], format=SCHEMA, options=options)
    assert json.loads(answer.message.content)["place"] in ("lake", "mill")
    answer = client.generate("bundled", "Hello", format="json", options=options)
    assert answer.response.startswith("{")


def test_log_probabilities_come_with_the_text(client: ollama.Client):
    asked = {"options": GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = client.chat("bundled", [USER], **asked)
    assert "".join(each.token for each in whole.logprobs) == whole.message.content
    assert all(len(each.top_logprobs) == 2 for each in whole.logprobs)
    lines = list(client.chat("bundled", [USER], stream=True, **asked))
    streamed = [each for line in lines for each in line.logprobs or ()]
    assert streamed == list(whole.logprobs)


def test_tools_are_functions_of_python(server: Any, client: ollama.Client):
    with answering(server.engine, f"I add.\n\n{CALL}\n{CALL}"):
        whole = client.chat("bundled", [USER], tools=[add])
        lines = list(client.chat("bundled", [USER], tools=[add], stream=True))
    assert (whole.message.content, whole.done_reason) == ("I add.", "stop")
    calls = [call.function for call in whole.message.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1, "b": 2})] * 2
    assert add(**calls[0].arguments) == 3
    streamed = [call.function for line in lines for call in line.message.tool_calls or ()]
    assert streamed == calls
    assert "".join(line.message.content for line in lines) == "I add."
    result = {"role": "tool", "tool_name": "add", "content": "3"}
    assert client.chat("bundled", [USER, whole.message, result], options=GREEDY).message.content


def test_a_cut_call_is_left_out(server: Any, client: ollama.Client):
    with answering(server.engine, CALL[:50]):
        answer = client.chat("bundled", [USER], tools=[add])
    assert "add" not in str(answer.message.tool_calls)


def test_the_lists_of_models(server: Any, client: ollama.Client):
    [entry] = client.list().models
    [running] = client.ps().models
    assert entry.model == running.model == "bundled:latest"
    assert len(entry.digest) == 64
    assert (entry.details.family, entry.details.parameter_size) == ("llama", "3.4M")
    assert running.size > entry.size > 10**6
    assert running.context_length == 1024
    assert client.chat(entry.model, [USER], options=GREEDY).model == "bundled:latest"
    shown = client.show("bundled")
    assert shown.modelinfo["llama.context_length"] == 1024
    assert "completion" in shown.capabilities
    assert "tools" in shown.capabilities
    assert "message" in shown.template
    assert server.get("/api/version").json() == server.get("/version").json()


def test_errors_reach_the_client_as_its_own(server: Any, client: ollama.Client):
    with pytest.raises(ollama.ResponseError, match="does not exist") as refused:
        client.chat("another", [USER])
    assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not supported: embeddings need") as refused:
        client.embed("bundled", "Hello")
    assert refused.value.status_code == 501
    for call in (client.pull, client.delete, client.push):
        with pytest.raises(ollama.ResponseError, match="is not supported: the server has"):
            call("bundled")
    with pytest.raises(ollama.ResponseError, match="images is not supported"):
        client.generate("bundled", "Look", images=["aGVsbG8="])
    with pytest.raises(ollama.ResponseError, match="think is not supported: bundled does not"):
        client.chat("bundled", [USER], think=True)
    assert client.chat("bundled", [USER], think=False, options=GREEDY).message.content
    assert server.post("/api/nowhere").json().keys() == {"error"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": {"num_predict": 0}}, "options.num_predict must be at least 1"),
        ({"options": {"mirostat": 1}}, "options.mirostat is not supported: use top_p"),
        (
            {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
            "options.repeat_last_n is not supported",
        ),
        ({"options": {"top_k": 1.5}}, "options.top_k"),
        ({"format": "xml"}, "format"),
        ({"format": {"type": "hiccup"}}, "format"),
        ({"think": "much"}, "think"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"truncate": 7}, "truncate is not supported"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"messages": [{**USER, "images": ["aGk="]}]}, "messages.0.images is not supported"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(server, change, words):
    answer = server.post("/api/chat", **{"messages": [USER], **change})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]


SWITCHED = """{% for m in messages %}{{ m.content }}{{ m.reasoning }}{% endfor %}
{% if not enable_thinking %}no thoughts{% endif %}{{ reasoning_effort }}"""
"""A chat template that turns reasoning on and off."""


@pytest.fixture(scope="module")
def thinker() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("bundled", reasoning_parser="qwen3", num_blocks=512)
    yield engine
    engine.shutdown()


def test_reasoning_is_turned_on_and_off(thinker: AsyncLLM):
    text = "<think>\nHm, so.\n</think>\n\nThe otter."
    with live(thinker, ServeConfig(chat_template=SWITCHED)) as url, answering(thinker, text):
        client = ollama.Client(host=url)
        whole = client.chat("bundled", [USER], think=True)
        lines = list(client.chat("bundled", [USER], think=True, stream=True))
        texts = list(client.generate("bundled", "Who?", think=True, stream=True))
        again = [USER, whole.message, USER]
        answers = [client.chat("bundled", again, think=think) for think in (True, False, "high")]
        capabilities = client.show("bundled").capabilities
        client.close()
    assert (whole.message.thinking, whole.message.content) == ("Hm, so.", "The otter.")
    assert "".join(line.message.thinking or "" for line in lines) == "Hm, so."
    assert "".join(line.message.content for line in lines) == "The otter."
    assert "".join(line.thinking or "" for line in texts) == "Hm, so."
    assert "".join(line.response for line in texts) == "The otter."
    on, off, high = (answer.prompt_eval_count for answer in answers)
    assert on > whole.prompt_eval_count, "the template got the reasoning of an earlier turn"
    assert off > high > on
    assert "thinking" in capabilities


def test_reasoning_without_a_switch_cannot_be_turned(thinker: AsyncLLM):
    with live(thinker) as url:
        client = ollama.Client(host=url)
        for think in (True, False):
            with pytest.raises(ollama.ResponseError, match="this model's chat template has no"):
                client.chat("bundled", [USER], think=think)
        client.close()


def test_an_unknown_option_is_named(server: Any):
    answer = server.post("/api/chat", messages=[USER], options={**GREEDY, "sparkle": 1})
    assert answer.headers["x-mie-ignored"] == "options.sparkle"
