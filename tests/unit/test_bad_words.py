"""Test bad words: their tokens, their bans, and that no answer contains one."""

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
