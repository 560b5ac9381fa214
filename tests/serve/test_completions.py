"""`/v1/completions`: prompts of every form, choices, log-probabilities, streams."""

import asyncio
import math

import pytest

from mie import SamplingParams
from mie.serve.openai.logprobs import finite
from mie.text.tokenizer import Tokenizer

PATH = "/v1/completions"
PROMPT = "Once upon a time there was"
GREEDY = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def offline(llm):
    """The output of `LLM.generate` for a prompt and parameters."""

    def generate(prompt, **params):
        [output] = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
        return output

    return generate


def texts(answer):
    return [choice["text"] for choice in answer["choices"]]


def joined(chunks, index=0):
    return "".join(
        choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def test_the_shape_of_an_answer(server, offline):
    answer = server.ask(PATH, model="bundled", prompt=PROMPT, **GREEDY)
    expected = offline(PROMPT, **GREEDY)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "bundled"
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["choices"] == [
        {
            "index": 0,
            "text": expected.outputs[0].text,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    num_prompt = len(expected.prompt_token_ids)
    usage = answer["usage"]
    assert usage.pop("prompt_tokens_details")["cached_tokens"] >= 0
    assert usage == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 8,
        "total_tokens": num_prompt + 8,
    }


def test_seeded_choices_are_the_engines(server, offline):
    asked = {"n": 3, "seed": 5, "temperature": 1.2, "max_tokens": 12}
    expected = [each.text for each in offline(PROMPT, **asked).outputs]
    assert texts(server.ask(PATH, prompt=PROMPT, **asked)) == expected


def test_four_forms_of_prompts(server, llm, offline):
    ids = llm.tokenizer.encode(PROMPT)
    more = llm.tokenizer.encode("The old mill")
    one = offline(PROMPT, **GREEDY).outputs[0].text
    other = offline("The old mill", **GREEDY).outputs[0].text
    for prompt, expected in (
        (PROMPT, [one]),
        ([PROMPT, "The old mill"], [one, other]),
        (ids, [one]),
        ([more, ids, more], [other, one, other]),
    ):
        assert texts(server.ask(PATH, prompt=prompt, **GREEDY)) == expected


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scoring_a_given_text(server, offline, max_tokens):
    """The parameter echo with log-probabilities is how lm-eval scores a text."""
    answer = server.ask(
        PATH, prompt=PROMPT, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    )
    expected = offline(PROMPT, max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1)
    continuation = expected.outputs[0].text if max_tokens else ""
    assert answer["choices"][0]["text"] == PROMPT + continuation
    logprobs = answer["choices"][0]["logprobs"]
    rows = [*expected.prompt_logprobs, *expected.outputs[0].logprobs]
    ids = [*expected.prompt_token_ids, *expected.outputs[0].token_ids]
    count = len(expected.prompt_token_ids) + max_tokens
    assert [len(logprobs[key]) for key in logprobs] == [count] * 4
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    wanted = [row[i].logprob for row, i in zip(rows[1:], ids[1:], strict=True)][: count - 1]
    assert logprobs["token_logprobs"][1:] == wanted
    assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == max_tokens


def test_offsets_say_where_each_token_begins(server):
    answer = server.ask(PATH, prompt=PROMPT, echo=True, logprobs=0, **GREEDY)
    choice = answer["choices"][0]
    logprobs, text = choice["logprobs"], choice["text"]
    assert logprobs["tokens"][0] == "<|bos|>"  # which is no part of the text
    ends = [*logprobs["text_offset"][1:], len(text)]
    for token, begin, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=True):
        assert text[begin:end] == ("" if token == "<|bos|>" else token)


def test_offsets_of_characters_in_several_tokens(server):
    answer = server.ask(PATH, prompt="Zoë 🦊 ran", echo=True, logprobs=0, max_tokens=0)
    logprobs = answer["choices"][0]["logprobs"]
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert len("Zoë 🦊") in offsets  # where " ran" begins


def test_streamed_logprobs_and_ids_are_those_of_the_whole_answer(server):
    asked = {"prompt": "Zoë 🦊 and", "logprobs": 3, "seed": 7, "max_tokens": 24, "echo": True}
    asked["return_token_ids"] = True
    choice = server.ask(PATH, **asked)["choices"][0]
    whole = choice["logprobs"]
    chunks = server.stream(PATH, **asked)
    pieces = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    for key, value in whole.items():
        assert [each for piece in pieces for each in piece[key]] == value
    ids = [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
    assert ids == choice["token_ids"]


def test_a_probability_of_zero_is_a_number_that_json_has():
    assert [finite(each) for each in (-math.inf, -1e9, -0.5)] == [-9999.0, -9999.0, -0.5]


def test_prompt_logprobs_in_vllms_shape(server):
    [choice] = server.ask(PATH, prompt=[5, 6, 7], prompt_logprobs=1, max_tokens=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert [str(i) in row for i, row in zip((6, 7), rest, strict=True)] == [True, True]
    assert rest[0]["6"].keys() == {"logprob", "rank", "decoded_token"}


def test_a_stop_string_ends_the_text_and_is_named(server):
    whole = server.ask(PATH, prompt=PROMPT, temperature=0, max_tokens=40)["choices"][0]["text"]
    stop = whole[10:14]
    for asked in ({"stop": stop}, {"stop": ["never there", stop]}):
        choice = server.ask(PATH, prompt=PROMPT, temperature=0, max_tokens=40, **asked)["choices"][
            0
        ]
        assert choice["text"] == whole[: whole.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    chunks = server.stream(PATH, prompt=PROMPT, temperature=0, max_tokens=40, stop=stop)
    assert joined(chunks) == whole[: whole.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_a_stream_is_made_of_nonempty_chunks_of_one_id(server):
    chunks = server.stream(PATH, prompt="Zoë 🦊 and", seed=2, max_tokens=60, temperature=1.5)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len({chunk["created"] for chunk in chunks}) == 1
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    assert reasons[-1] in ("length", "stop")
    whole = server.ask(PATH, prompt="Zoë 🦊 and", seed=2, max_tokens=60, temperature=1.5)
    assert joined(chunks) == whole["choices"][0]["text"]


def test_usage_of_a_stream(server):
    asked = {"prompt": ["A mill", "A bell"], "max_tokens": 4, "seed": 1, "n": 2}
    answer = server.ask(PATH, **asked)
    whole = answer["usage"]
    *chunks, last = server.stream(PATH, stream_options={"include_usage": True}, **asked)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"].pop("prompt_tokens_details").keys() == {"cached_tokens"}
    del whole["prompt_tokens_details"]
    assert last["usage"] == whole
    assert [joined(chunks, index) for index in range(4)] == texts(answer)
    assert last["metrics"]["num_preemptions"] == 0
    assert last["metrics"]["mean_itl_ms"] > 0


def test_usage_in_every_chunk_counts_the_tokens_so_far(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": PROMPT, "max_tokens": 6, "seed": 1, "logprobs": 1}
    *chunks, last = server.stream(PATH, stream_options=options, **asked)
    sent = 0  # a chunk holds as many tokens as were ready
    for chunk in chunks:
        for choice in chunk["choices"]:
            sent += len((choice["logprobs"] or {"tokens": []})["tokens"])
        assert chunk["usage"]["completion_tokens"] == sent
    assert last["usage"]["completion_tokens"] == sent == 6


def test_cached_tokens_are_always_reported(server):
    prompt = list(range(100, 180))
    salt = {"cache_salt": "of this test"}
    first = server.ask(PATH, prompt=prompt, max_tokens=1, **salt)
    again = server.ask(PATH, prompt=prompt, max_tokens=1, **salt)
    other = server.ask(PATH, prompt=prompt, max_tokens=1, cache_salt="another")
    options = {"include_usage": True}
    *_, last = server.stream(PATH, prompt=prompt, max_tokens=1, stream_options=options, **salt)
    answers = (first, again, other, last)
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert cached == [0, 79, 0, 79]  # One token is always computed.


def test_what_fits_the_context(server):
    prompt = list(range(5, 1020))
    assert server.ask(PATH, prompt=prompt, max_tokens=9)["usage"]["total_tokens"] <= 1024
    # A larger maximum ends where the context does, and the answer names it. The default is 16.
    for asked, ignored in (({}, None), ({"max_tokens": 10}, "max_tokens")):
        answer = server.post(PATH, prompt=prompt, ignore_eos=True, **asked)
        assert answer.json()["usage"]["completion_tokens"] == 9
        assert answer.headers.get("x-mie-ignored") == ignored
    too_long = server.refused(PATH, prompt=list(range(5, 1029)), max_tokens=1)
    assert (too_long["n_prompt_tokens"], too_long["n_ctx"]) == (1024, 1024)
    for prompt in (list(range(5, 1029)), "a mill " * 800, "a" * 10**5):
        assert server.refused(PATH, prompt=prompt)["code"] == "context_length_exceeded"


def test_texts_without_special_tokens_are_encoded_beside_the_event_loop(server, monkeypatch):
    """And too long ones not at all: the event loop would stand still meanwhile."""
    texts = []
    encode = Tokenizer.encode

    def watched(self, text, **options):
        texts.append(text)
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    asked = {"max_tokens": 1, "add_special_tokens": False}
    server.ask("/v1/completions", prompt=["A mill", "An otter"], **asked)
    assert texts == ["A mill", "An otter"]
    error = server.refused("/v1/completions", prompt="a b" * 100_000, **asked)
    assert error["code"] == "context_length_exceeded"
    assert len(texts) == 2
