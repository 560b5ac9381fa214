"""Test bad words: their tokens, their bans, and that no answer contains one."""

from __future__ import annotations

import naive
import pytest
import small_tokenizers

from mie import LLM, EngineConfig, SamplingParams
from mie.errors import RequestError
from mie.load.engine import load_engine
from mie.text.tokenizer import encode_bad_words

# Spelling.


class Spelling:
    """A tokenizer that knows a few texts."""

    def __init__(self, **texts: list[int]) -> None:
        self.texts = {text.replace("_", " "): ids for text, ids in texts.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return self.texts[text]


@pytest.mark.parametrize(
    ("texts", "spelled"),
    [
        ({"cat": [1], "_cat": [2]}, ((1,), (2,))),
        ({"cat": [1, 2], "_cat": [3, 2]}, ((1, 2), (3, 2))),
        ({"cat": [1], "_cat": [9, 1]}, ((1,),)),  # the space is a separate token
        ({"cat": [1, 2], "_cat": [1, 2]}, ((1, 2),)),  # the tokenizer adds the space itself
        ({"cat": [1, 2], "_cat": [3]}, ((1, 2), (3,))),  # vLLM leaves this one out
    ],
)
def test_a_word_is_spelled_with_and_without_a_space(texts, spelled):
    assert encode_bad_words(Spelling(**texts), ["cat"]) == spelled
    assert encode_bad_words(Spelling(**texts), ["  cat"]) == spelled


def test_a_word_without_tokens_is_refused():
    with pytest.raises(RequestError, match="no tokens for the bad word 'cat'"):
        encode_bad_words(Spelling(cat=[], _cat=[]), ["cat"])
    with pytest.raises(RequestError, match="surrogate"):
        encode_bad_words(small_tokenizers.byte_level(), ["\ud800"])


# Bans.


def answers(tiny, requests, **settings):
    """Return {(request, choice): tokens}, and the numbers of preemptions and prefix hits."""
    config = EngineConfig(**{"num_blocks": 64, "block_size": 4, **settings})
    engine = load_engine(tiny["llama"].directory, config, dtype="float64")
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(prompt, SamplingParams(**params), str(number))
    tokens: dict[tuple[str, int], list[int]] = {}
    num_preemptions = num_cached = 0
    while engine.has_work:
        for new in engine.step().outputs:
            tokens.setdefault((new.request_id, new.index), []).extend(new.token_ids)
            if new.finish_reason is not None:
                num_preemptions += new.metrics.num_preemptions
                num_cached += new.metrics.num_cached_tokens
    return tokens, num_preemptions, num_cached


def oracle(tiny, prompt, params, choice=0, stream=0):
    model = tiny["llama"]
    return naive.generate(
        model.config, model.weights, prompt, params, choice=choice, stream=stream, eos=[3]
    )[0]


PROMPTS = [[7, 1, 9, 4, 4, 1, 8, 2, 6], [7, 1, 9, 4, 4, 1, 8, 5], [2], [7, 1, 9, 4, 4, 1, 8, 2, 6]]


def banned_pairs(tokens: list[int]) -> list[list[int]]:
    """Return words of one, two and three tokens that an answer contains."""
    return [tokens[0:1], tokens[2:4], tokens[5:8]]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 16, "preemption_mode": "swap"},  # some are preempted
        {"async_scheduling": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_equal_the_oracle_under_any_schedule(tiny, settings, temperature):
    requests, wanted = [], {}
    for number, prompt in enumerate(PROMPTS):
        params = {"temperature": temperature, "max_tokens": 20, "ignore_eos": True, "seed": number}
        words = banned_pairs(oracle(tiny, prompt, params))
        for _ in range(2):  # the replacement contains bad words, too
            params["bad_words_token_ids"] = words
            words = words + banned_pairs(oracle(tiny, prompt, params))
        params["n"] = 1 + number % 2
        requests.append((prompt, params))
        for choice in range(params["n"]):
            wanted[str(number), choice] = oracle(tiny, prompt, params, choice)
    tokens, num_preemptions, num_cached = answers(tiny, requests, **settings)
    assert tokens == wanted
    assert num_preemptions > 0 or "num_blocks" not in settings
    assert num_cached > 0 or "max_num_seqs" not in settings
    for (number, _), answer in tokens.items():
        for word in requests[int(number)][1]["bad_words_token_ids"]:
            spans = (answer[i : i + len(word)] for i in range(len(answer)))
            assert word not in list(spans)


def test_bad_words_that_leave_no_token_are_refused(tiny):
    engine = load_engine(tiny["llama"].directory, EngineConfig(num_blocks=16))
    for params in (
        {"allowed_token_ids": [5, 6], "bad_words_token_ids": [[5], [7, 6]]},
        {"bad_words_token_ids": [[i] for i in range(40)]},
        {"bad_words_token_ids": [[i] for i in range(40) if i != 3], "min_tokens": 1},
    ):
        with pytest.raises(RequestError, match="bad words may ban every allowed token"):
            engine.add_request([1], SamplingParams(**params))
    with pytest.raises(RequestError, match="bad_words_token_ids has token id 40"):
        engine.add_request([1], SamplingParams(bad_words_token_ids=[[1, 40]]))
    with pytest.raises(RequestError, match="bad_words needs a tokenizer, and the engine has none"):
        engine.add_request([1], SamplingParams(bad_words=["cat"]))
    assert not engine.has_work


# Text.


def test_an_answer_has_no_bad_word():
    llm = LLM("bundled")
    prompts = ["Once upon a time", "Tell me a story about Mia the fox."]

    def texts(**params):
        sampling = SamplingParams(temperature=0, max_tokens=60, **params)
        return [out.outputs[0].text for out in llm.generate(prompts, sampling, use_tqdm=False)]

    before = texts()
    words = {word.strip(".,\"'!?") for text in before for word in text.split()[3:9]} - {""}
    assert words
    for text in texts(bad_words=sorted(words)):
        assert text
        assert not words & set(text.split()), text
    assert texts() == before
