"""The deltas of any token ids join to the decoding of all of them, and show no half characters."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_tokenizers import DECODERS, KINDS, ODD_TOKENS, with_decoder

from mie.text.detokenizer import Detokenizer
from mie.text.tokenizer import Tokenizer

TOKENIZERS = {**{name: make() for name, make in KINDS.items()}} | {
    f"decoder:{name}": with_decoder(name) for name in DECODERS
}


@st.composite
def streams(draw: st.DrawFn) -> tuple[Tokenizer, list[list[int]], list[int]]:
    """A tokenizer, ids in chunks (some of no token), and the ids of a prompt."""
    tokenizer = TOKENIZERS[draw(st.sampled_from(sorted(TOKENIZERS)))]
    # Ids past the vocabulary stand for a model's padding rows; 259 … are mostly words in llama2.
    ids = st.integers(0, tokenizer.vocab_size + 3) | st.integers(0, 40)
    chunks = draw(st.lists(st.lists(ids, max_size=6), max_size=12))
    return tokenizer, chunks, draw(st.lists(ids, max_size=5))


def joined(detokenizer: Detokenizer, chunks: list[list[int]]) -> str:
    return "".join([detokenizer.add(chunk) for chunk in chunks]) + detokenizer.finish()


@given(streams(), st.booleans())
@example((TOKENIZERS["llama2"], [[3 + 0xF0], [3 + 0x9F, 3 + 0x98], [3 + 0x80]], []), True)
@example((TOKENIZERS["llama2"], [[3 + 0xC3], [3 + 0xA9, 3 + 0xC3]], []), True)
def test_deltas_join_to_decode(
    stream: tuple[Tokenizer, list[list[int]], list[int]], skip: bool
) -> None:
    tokenizer, chunks, _ = stream
    ids = list(itertools.chain(*chunks))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert joined(detokenizer, chunks) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(streams())
def test_pending_is_what_finish_gives_and_changes_nothing(
    stream: tuple[Tokenizer, list[list[int]], list[int]],
) -> None:
    tokenizer, chunks, _ = stream
    detokenizer = Detokenizer(tokenizer)
    seen, text = [], ""
    for chunk in chunks:
        seen += chunk
        text += detokenizer.add(chunk)
        assert text + detokenizer.pending() == tokenizer.decode(seen)
    assert text + detokenizer.finish() == tokenizer.decode(seen)


@given(streams())
def test_text_continues_the_prompt(
    stream: tuple[Tokenizer, list[list[int]], list[int]],
) -> None:
    tokenizer, chunks, prompt = stream
    ids = list(itertools.chain(*chunks))
    before = Detokenizer(tokenizer)
    settled = before.add(prompt)
    if before.pending():
        return  # the prompt ends inside a character; see test_text_detokenizer.py
    text = joined(Detokenizer(tokenizer, prompt), chunks)
    assert settled + text == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize("name", ["byte_level", "llama2"])
@given(text=st.text())
def test_text_comes_back_and_no_delta_shows_a_half_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.add([token_id]) for token_id in ids] + [detokenizer.finish()]
    assert "".join(deltas) == tokenizer.decode(ids)
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


def test_the_odd_vocabulary_reaches_every_kind_of_step() -> None:
    # A decoder that the machines do not follow waits for the end; most must not.
    held_back = {
        name
        for name in DECODERS
        if not Detokenizer(with_decoder(name)).add([ODD_TOKENS.index("é"), ODD_TOKENS.index("|")])
    }
    assert held_back == {
        "bpe",
        "ctc",
        "fused_metaspace",
        "fused_replace_pair",
        "metaspace_then_strip",
        "replace_regex",
        "strip",
    }
