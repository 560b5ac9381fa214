"""Test bad words: their tokens, their bans, and that no answer contains one."""

import dataclasses

import pytest
import small_tokenizers
from engines import run_to_end

from mie import LLM, EngineConfig, SamplingParams
from mie.errors import RequestError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
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


def test_bad_words_that_leave_no_token_are_refused(tiny):
    engine = load_engine(tiny["llama"].directory, LoadSettings(engine=EngineConfig(num_blocks=16)))
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


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_bad_word_counts_only_where_all_of_it_is_output(tiny, length, num_before):
    """The first tokens of the word end the prompt, and the others are forced by their logits."""
    engine = load_engine(
        tiny["llama"].directory, LoadSettings(engine=EngineConfig(num_blocks=16), backend="numpy")
    )
    word = [11, 12, 13, 14][:length]
    num_before = min(num_before, length - 1)
    for is_alone in (True, False):  # beside a shorter word, and without one
        words = [word] if is_alone else [word, [30, 31], [32]]
        for count in range(num_before, length):
            params = SamplingParams(
                max_tokens=1,
                temperature=0,
                bad_words_token_ids=words,
                logit_bias={word[count]: 100.0},
                trace_decode_token_ids=word[num_before:count] or None,
            )
            engine.add_request(
                [5, 6, *word[:num_before]], dataclasses.replace(params, max_tokens=count + 1)
            )
            [found] = run_to_end(engine).values()
            is_banned = num_before == 0 and count == length - 1
            assert (found[count - num_before] == word[count]) != is_banned
