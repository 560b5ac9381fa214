"""Test Detokenizer and TextStream case by case; property/ tests the general promise."""

import pytest
from small_tokenizers import KINDS, wrap
from tokenizers import Tokenizer as Backend

from mie.text.detokenizer import Detokenizer
from mie.text.stream import TextStream

NEWLINE = 3 + 0x0A  # llama2's byte tokens begin at id 3


def test_the_space_between_prompt_and_text_is_kept() -> None:
    tokenizer = KINDS["llama2"]()
    prompt = tokenizer.encode("the dragon")
    word = [tokenizer.token_to_id("▁the")]
    assert Detokenizer(tokenizer).add(word) == "the"
    assert Detokenizer(tokenizer, prompt).add(word) == " the"
    assert Detokenizer(tokenizer, [1]).add(word) == "the"  # BOS is not text.


def test_bytes_held_back_inside_min_tokens_stop_nothing_later() -> None:
    tokenizer = KINDS["llama2"]()
    word = tokenizer.token_to_id("▁the")
    stream = TextStream(tokenizer, [word], stop=["\n"])
    assert stream.add([NEWLINE], armed=False) == ("", None)
    assert stream.add([word]) == ("\n the", None)
    assert stream.add([NEWLINE]) == ("", "\n")
    stream = TextStream(tokenizer, [word], stop=["\n\n"])
    assert stream.add([NEWLINE], armed=False) == ("", None)
    assert stream.add([NEWLINE]) == ("", "\n\n")


def test_a_character_that_the_prompt_began_is_new_text() -> None:
    tokenizer = KINDS["llama2"]()
    stream = TextStream(tokenizer, [NEWLINE, 3 + 0xC3], stop=["é"])
    assert stream.add([3 + 0xA9]) == ("", "é")
    broken = Detokenizer(tokenizer, [3 + 0xC3])
    assert broken.add([3 + 0x41]) == ""
    assert broken.finish() == "\ufffd"  # of two bytes, the first of which belongs to the prompt


@pytest.mark.parametrize(("kind", "token"), [("no_decoder", "cat"), ("wordpiece", "the")])
def test_spaces_between_special_tokens(kind: str, token: str) -> None:
    backend = Backend.from_str(KINDS[kind]()._backend.to_str())
    backend.add_special_tokens(["<x>", "<y>"])
    tokenizer = wrap(backend)
    word, x, y = (tokenizer.token_to_id(token) for token in (token, "<x>", "<y>"))
    ids = [word, x, y, y, word, x]

    def text(skip: bool = False, **setting: bool) -> str:
        stream = TextStream(tokenizer, skip_special_tokens=skip, **setting)
        return "".join(stream.add([token_id])[0] for token_id in ids) + stream.finish()[0]

    assert text() == text(spaces_between_special_tokens=True) == tokenizer.decode(ids, False)
    assert text(spaces_between_special_tokens=False) == f"{token} <x><y><y> {token} <x>"
    assert text(skip=True, spaces_between_special_tokens=False) == f"{token} {token}"
