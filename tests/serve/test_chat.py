"""`/v1/chat/completions`: templates, log-probabilities, the chunks of a stream."""

import shutil
from pathlib import Path

from audit import engine_of
from live_server import live

import mie
from mie import AsyncLLM, SamplingParams
from mie.serve.config import ServeConfig

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tell me a story about Mia the fox."}]
GREEDY = {"temperature": 0, "max_tokens": 12}


def content(chunks, index=0):
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)


def test_the_shape_of_an_answer(server, llm):
    answer = server.ask(PATH, messages=MESSAGES, **GREEDY)
    [expected] = llm.chat(MESSAGES, SamplingParams(**GREEDY), use_tqdm=False)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": expected.outputs[0].text, "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_the_shape_of_a_stream(server):
    whole = server.ask(PATH, messages=MESSAGES, **GREEDY)
    first, *middle, last = server.stream(PATH, messages=MESSAGES, **GREEDY)
    assert {first["object"], *(c["object"] for c in middle)} == {"chat.completion.chunk"}
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["finish_reason"] is None
    assert all(chunk["choices"][0]["delta"].keys() == {"content"} for chunk in middle)
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in middle)
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "length"
    assert content(middle) == whole["choices"][0]["message"]["content"]


def test_each_choice_of_a_stream_begins_with_its_role(server):
    chunks = server.stream(PATH, messages=MESSAGES, n=3, max_tokens=4, seed=1)
    whole = server.ask(PATH, messages=MESSAGES, n=3, max_tokens=4, seed=1)
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["finish_reason"] == "length"
        assert content(chunks, index) == whole["choices"][index]["message"]["content"]


def test_logprobs_have_the_bytes_of_each_token(server):
    asked = {"messages": [{"role": "user", "content": "Zoë 🦊"}], "seed": 4, "max_tokens": 40}
    asked |= {"logprobs": True, "top_logprobs": 2, "temperature": 1.8}
    answer = server.ask(PATH, **asked)["choices"][0]
    rows = answer["logprobs"]["content"]
    text = answer["message"]["content"]
    joined = bytes(byte for row in rows for byte in row["bytes"]).decode(errors="replace")
    assert joined.startswith(text) or text.startswith(joined)
    for row in rows:
        assert row.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(row["top_logprobs"]) == 2
        tops = [top["logprob"] for top in row["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
    chunks = server.stream(PATH, **asked)
    streamed = [
        each
        for chunk in chunks
        if chunk["choices"][0]["logprobs"]
        for each in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == rows


def test_the_last_message_may_be_continued(server):
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon a"}]
    asked = {"messages": messages, "continue_final_message": True}
    prompt = server.ask("/apply-template", **asked)["prompt"]
    assert prompt.endswith("Once upon a")
    answer = server.ask(PATH, **asked, **GREEDY)
    whole = server.ask("/v1/completions", prompt=prompt, add_special_tokens=False, **GREEDY)
    assert answer["choices"][0]["message"]["content"] == whole["choices"][0]["text"]
    error = server.refused(PATH, add_generation_prompt=True, **asked)
    assert error["param"] == "continue_final_message"


def test_a_template_of_the_request_needs_trust(server):
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    error = server.refused(PATH, messages=MESSAGES, chat_template=template)
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")
    assert "--trust-request-chat-template" in error["message"]
    with live(server.engine, ServeConfig(trust_request_chat_template=True)) as url:
        asked = {"messages": MESSAGES, "chat_template": template}
        answer = server.client.post(f"{url}/apply-template", json=asked)
        assert answer.json() == {"prompt": MESSAGES[0]["content"] + "!"}
        asked["chat_template"] = "{{ raise_exception('not like this') }}"
        answer = server.client.post(f"{url}/apply-template", json=asked)
        assert answer.status_code == 400
        assert "not like this" in answer.json()["error"]["message"]


def test_a_template_of_the_server(server, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}{{ extra }}")
    with live(server.engine, ServeConfig(chat_template=str(path))) as url:
        asked = {"messages": MESSAGES, "chat_template_kwargs": {"extra": "more"}}
        answer = server.client.post(f"{url}/apply-template", json=asked)
        assert answer.json() == {"prompt": f"<{MESSAGES[0]['content']}>more"}


def test_a_template_that_is_missing_or_refuses_is_named_without_its_directory(server, tmp_path):
    """The folders of the server's files are no client's business."""
    bundled = Path(mie.__file__).parent / "assets/tiny"
    folder = shutil.copytree(bundled, tmp_path / "model")
    template = folder / "chat_template.jinja"
    for text, expected in (
        (None, "chat_template.jinja"),
        ("{{ raise_exception('never') }}", "chat_template.jinja refused the messages: never"),
    ):
        template.unlink() if text is None else template.write_text(text)
        engine = AsyncLLM(folder, num_blocks=8)
        try:
            with live(engine) as url:
                answer = server.client.post(f"{url}{PATH}", json={"messages": MESSAGES})
                models = server.client.get(f"{url}/v1/models").json()["data"]
        finally:
            engine.shutdown()
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400
        assert expected in message
        assert str(folder) not in message
        assert [model["id"] for model in models] == ["model", str(folder)]


def test_a_variable_of_a_template_may_have_any_name(server):
    """These are names of Python's and of the renderer's own."""
    messages = [{"role": "user", "content": "hi"}]
    plain = server.ask("/apply-template", messages=messages)
    names = dict.fromkeys(("self", "source", "variables", "loop", "cls"), 1)
    assert server.ask("/apply-template", messages=messages, chat_template_kwargs=names) == plain


def test_a_prediction_is_used_for_drafts_or_named_as_ignored(server):
    whole = server.ask(PATH, messages=MESSAGES, **GREEDY)
    text = whole["choices"][0]["message"]["content"]
    predicted = {"prediction": {"type": "content", "content": [{"type": "text", "text": text}]}}
    body = {"messages": MESSAGES, **GREEDY, **predicted}
    assert server.client.post(PATH, json=body).headers["x-mie-ignored"] == "prediction"
    engine = AsyncLLM("bundled", num_blocks=64, speculative_config={"method": "ngram"})
    try:
        with live(engine) as url:
            answer = server.client.post(f"{url}{PATH}", json=body)
            metrics = server.client.get(f"{url}/metrics").text
        num_steps = engine_of(engine).stats.num_steps
    finally:
        engine.shutdown()
    assert "x-mie-ignored" not in answer.headers
    assert answer.json()["choices"] == whole["choices"]
    assert num_steps < GREEDY["max_tokens"]
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0"' in metrics
