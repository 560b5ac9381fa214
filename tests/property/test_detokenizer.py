"""Check that deltas join to the decoding of all tokens and never show half a character."""

import itertools

import pytest
from audit import backend_of
from hypothesis import example, given
from hypothesis import strategies as st
from small_tokenizers import BYTE_KINDS, DECODERS, KINDS, ODD_TOKENS, with_decoder

from mie.serve.openai.logprobs import TextOffsets
from mie.text.detokenizer import Detokenizer
from mie.text.token_bytes import TokenBytes
from mie.text.tokenizer import Tokenizer

TOKENIZERS = {name: make() for name, make in (KINDS | BYTE_KINDS).items()} | {
    f"decoder:{name}": with_decoder(name) for name in DECODERS
}


@st.composite
def streams(draw: st.DrawFn) -> tuple[Tokenizer, list[list[int]], list[int]]:
    """Draw a tokenizer, ids in chunks (some empty), and the ids of a prompt."""
    tokenizer = TOKENIZERS[draw(st.sampled_from(sorted(TOKENIZERS)))]
    # Ids past the vocabulary stand for a model's padding rows. 259 … are mostly words in llama2.
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


def by_library(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    return str(backend_of(tokenizer).decode(ids, skip)) if ids else ""


@given(streams(), st.booleans())
def test_whole_characters_are_those_of_the_library(
    stream: tuple[Tokenizer, list[list[int]], list[int]], skip: bool
) -> None:
    tokenizer, chunks, _ = stream
    ids = list(itertools.chain(*chunks))
    text, wanted = tokenizer.decode(ids, skip), by_library(tokenizer, ids, skip)
    steps = {step["type"] for step in tokenizer.decoder_steps}
    if "\ufffd" not in wanted or "ByteFallback" not in steps:
        assert text == wanted
        return
    # The library replaces each byte of a run with a broken character.
    found = iter(text)
    assert all(character in found for character in wanted.replace("\ufffd", ""))


characters = st.sampled_from([*"ab \n\té猫▁", *"🦄🫠🫥🪬🫱😀🎉", "\u0301", "\u200d", "the"])
texts = st.lists(characters, max_size=12).map("".join)


@pytest.mark.parametrize("name", BYTE_KINDS)
@given(texts, st.data())
def test_a_cut_destroys_no_complete_character(name: str, text: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    text = text.replace("▁", "") if name != "byte_level" else text
    encoded = backend_of(tokenizer).encode(text, add_special_tokens=False)
    ids, starts = encoded.ids, [start for start, _ in encoded.offsets]
    starts.append(len(text))
    assert tokenizer.decode(ids) == by_library(tokenizer, ids) == text
    # A stream holds back nothing but the first bytes of a character.
    stream, shown = Detokenizer(tokenizer), ""
    for end, token_id in enumerate(ids, start=1):
        shown += stream.add([token_id])
        assert shown == text[: starts[end]]
        is_inside = "\ufffd" in by_library(tokenizer, ids[:end])
        broken = "\ufffd" if is_inside else ""
        assert tokenizer.decode(ids[:end]) == shown + broken
        assert stream.pending() == stream.fork().finish() == broken
    # A token begins where the characters end that the tokens before it complete.
    assert [*TextOffsets(tokenizer, (), False).add(ids)] == starts[:-1]
    spell = TokenBytes(tokenizer)
    prefix = " " if ids and name in ("llama2", "phi3") else ""
    assert b"".join(map(spell, ids)).decode() == prefix + text
    # The rest continues the text of a prompt.
    cut = data.draw(st.integers(0, len(ids)))
    rest = Detokenizer(tokenizer, ids[:cut])
    after = "".join([rest.add([token_id]) for token_id in ids[cut:]]) + rest.finish()
    assert after == text[starts[cut] :]


@given(streams())
def test_pending_equals_finish_and_changes_nothing(
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


@given(streams(), st.booleans())
@example((TOKENIZERS["llama2"], [[300]], [3 + 0x0A]), True)
@example((TOKENIZERS["llama2"], [[3 + 0x20], [300]], [3 + 0x20]), True)
@example((TOKENIZERS["llama2"], [[3 + 0xAC]], [3 + 0x0A, 3 + 0xE2, 3 + 0x82]), True)
@example((TOKENIZERS["llama2"], [[300]], [3 + 0xE2]), True)
def test_the_text_continues_the_prompts_text(
    stream: tuple[Tokenizer, list[list[int]], list[int]], skip: bool
) -> None:
    tokenizer, chunks, prompt = stream
    ids = list(itertools.chain(*chunks))
    before = tokenizer.decode(prompt, skip)
    after = tokenizer.decode([*prompt, *ids], skip)
    text = joined(Detokenizer(tokenizer, prompt, skip), chunks)
    if after.startswith(before):
        assert text == after[len(before) :]
    else:  # a character of the prompt was completed, or its bytes became invalid
        assert "\ufffd" in before + after
        assert after.endswith(text)


@pytest.mark.parametrize("name", ["byte_level", "llama2"])
@given(text=st.text(alphabet="ab \n\té猫🦄▁", max_size=12), data=st.data())
def test_text_cut_between_any_two_tokens(name: str, text: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    after = tokenizer.decode(ids)
    # A character that the cut divides belongs to the answer as a whole.
    whole = (tokenizer.decode(ids[:end]).partition("\ufffd")[0] for end in range(cut + 1))
    before = max(whole, key=len)
    answer = joined(Detokenizer(tokenizer, ids[:cut]), [[token] for token in ids[cut:]])
    assert answer == after[len(before) :]


@pytest.mark.parametrize("name", ["byte_level", "llama2"])
@given(text=st.text())
def test_text_is_restored_and_no_delta_splits_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.add([token_id]) for token_id in ids] + [detokenizer.finish()]
    assert "".join(deltas) == tokenizer.decode(ids)
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


def test_the_awkward_vocabulary_exercises_every_kind_of_step() -> None:
    # A decoder that the machines do not follow waits for the end; most must not.
    held_back = {
        name
        for name in DECODERS
        if not Detokenizer(with_decoder(name)).add([ODD_TOKENS.index("é"), ODD_TOKENS.index("|")])
    }
    assert held_back == {
        "bpe",
        "ctc",
        "fallback_then_metaspace",
        "fused_metaspace",
        "fused_replace_pair",
        "metaspace_then_strip",
        "replace_regex",
        "strip",
    }
