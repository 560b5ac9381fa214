"""Test Detokenizer and TextStream case by case; property/ tests the general promise."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
from audit import backend_of
from small_tokenizers import BYTE_KINDS, KINDS, wrap
from tokenizers import Tokenizer as Backend

from mie.text.detokenizer import Detokenizer
from mie.text.stream import TextStream
from mie.text.tokenizer import Tokenizer

NEWLINE = 3 + 0x0A  # llama2's byte tokens begin at id 3
ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("MIE_SCOREBOARD_DATA", ROOT / "build/scoreboard/data"))


def test_the_space_between_prompt_and_text_is_kept() -> None:
    tokenizer = KINDS["llama2"]()
    prompt = tokenizer.encode("the dragon")
    word = [tokenizer.token_to_id("▁the")]
    assert Detokenizer(tokenizer).add(word) == "the"
    assert Detokenizer(tokenizer, prompt).add(word) == " the"
    assert Detokenizer(tokenizer, [1]).add(word) == "the"  # BOS is not text.


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_a_text_that_is_cut_inside_a_character_keeps_the_characters_before(kind: str) -> None:
    tokenizer = BYTE_KINDS[kind]()
    ids = tokenizer.encode("🫠🫥🪬🫱", add_special_tokens=False)[:-1]
    assert tokenizer.decode(ids) == "🫠🫥🪬\ufffd"
    stream = Detokenizer(tokenizer)
    deltas = [stream.add([token_id]) for token_id in ids]
    assert [delta for delta in deltas if delta] == ["🫠", "🫥", "🪬"]
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("kind", ["llama2", "gemma", "phi3"])
def test_a_byte_token_that_is_a_character_is_settled_at_once(kind: str) -> None:
    tokenizer = BYTE_KINDS[kind]()
    word = tokenizer.token_to_id("▁the")
    stream = TextStream(tokenizer, [word], stop=["\n"])
    assert stream.add([NEWLINE], armed=False) == ("\n", None)
    assert stream.add([word]) == (" the", None)
    assert stream.add([NEWLINE]) == ("", "\n")
    stream = TextStream(tokenizer, [word], stop=["\n\n"])
    assert stream.add([NEWLINE], armed=False) == ("", None)
    assert stream.add([NEWLINE]) == ("", "\n\n")


def test_a_character_that_the_prompt_began_is_new_text() -> None:
    tokenizer = KINDS["llama2"]()
    stream = TextStream(tokenizer, [NEWLINE, 3 + 0xC3], stop=["é"])
    assert stream.add([3 + 0xA9]) == ("", "é")
    broken = Detokenizer(tokenizer, [3 + 0xC3])
    assert broken.add([3 + 0x41]) == "A"  # the broken character belongs to the prompt
    assert broken.finish() == ""


def test_text_held_back_inside_min_tokens_stops_nothing_later() -> None:
    tokenizer = KINDS["end_of_word"]()  # its text is complete at the end
    far, *rest = tokenizer.encode("far from the far sea", add_special_tokens=False)
    stream = TextStream(tokenizer, stop=["far"])
    assert stream.add([far], armed=False) == ("", None)
    assert stream.add(rest) == ("far from the ", "far")


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("spaces", [True, False])
def test_special_tokens_are_skipped_kept_or_shown_beside_broken_characters(
    kind: str, spaces: bool
) -> None:
    tokenizer = BYTE_KINDS[kind]()
    one, two = sorted(tokenizer.special_ids)[-2:]
    names = [tokenizer.id_to_token(token_id) for token_id in (one, two)]
    parts = tokenizer.encode("🫠", add_special_tokens=False)
    ids = [*parts, one, two, *parts[:-1], one, *parts]

    def text(**options: Any) -> str:
        stream = Detokenizer(tokenizer, **options)
        return "".join(stream.add([token_id]) for token_id in ids) + stream.finish()

    first, second = names
    # A special token that is skipped is not there, so the bytes around it are neighbours.
    assert text() == tokenizer.decode(ids)
    shown = text(skip_special_tokens=False, spaces_between_special_tokens=spaces)
    assert shown == tokenizer.decode(ids, skip_special_tokens=False)
    assert shown.startswith(f"🫠{first}{second}")
    assert f"\ufffd{first}" in shown
    kept = text(kept_tokens=[second])
    assert second in kept
    assert first not in kept


@pytest.mark.parametrize("kind", KINDS)
def test_kept_tokens_stay_in_the_text_of_every_kind(kind: str) -> None:
    backend = Backend.from_str(backend_of(KINDS[kind]()).to_str())
    backend.add_special_tokens(["<x>", "<y>"])
    tokenizer = wrap(backend)
    ids = [tokenizer.token_to_id(token) for token in ("<x>", "<y>")]
    stream = Detokenizer(tokenizer, kept_tokens=["<x>"])
    assert (stream.add(ids) + stream.finish()).strip() == "<x>"


@pytest.mark.parametrize(("kind", "token"), [("no_decoder", "cat"), ("wordpiece", "the")])
def test_spaces_between_special_tokens(kind: str, token: str) -> None:
    backend = Backend.from_str(backend_of(KINDS[kind]()).to_str())
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


def check_random_tokens(tokenizer: Tokenizer, num_texts: int) -> None:
    """Compare each beginning of random texts, full of broken characters and special tokens."""
    rng, special_ids = random.Random(0), [*tokenizer.special_ids]
    assert tokenizer.byte_table is not None
    num_whole = 0
    for number in range(num_texts):
        largest = (tokenizer.vocab_size, 300)[number % 2]  # byte tokens are mostly the first ones
        ids = [rng.randrange(largest) for _ in range(24)]
        for place in rng.sample(range(len(ids)), rng.randrange(5)):
            ids[place] = rng.choice(special_ids)
        for skip in (True, False):
            detokenizer, text = Detokenizer(tokenizer, skip_special_tokens=skip), ""
            for end in range(1, len(ids) + 1):
                text += detokenizer.add(ids[end - 1 : end])
                wanted = tokenizer.decode(ids[:end], skip)
                assert text + detokenizer.pending() == wanted
                by_library = str(backend_of(tokenizer).decode(ids[:end], skip))
                num_whole += "\ufffd" not in by_library
                assert "\ufffd" in by_library or wanted == by_library
            at_once = Detokenizer(tokenizer, skip_special_tokens=skip)
            assert at_once.add(ids) + at_once.finish() == tokenizer.decode(ids, skip)
    assert num_whole > num_texts


def test_each_beginning_of_random_tokens_has_the_librarys_text() -> None:
    check_random_tokens(Tokenizer.load(ROOT / "mie/assets/tiny", None), num_texts=20)


@pytest.mark.slow
def test_random_tokens_of_published_vocabularies_have_the_librarys_text() -> None:
    paths = [path for path in DATA.glob("vocab/*.gguf") if "bert" not in path.name]
    if not paths:
        pytest.skip(
            f"{DATA} has no vocab/*.gguf (python -m scripts.scoreboard --get puts it there)"
        )
    for path in paths:
        check_random_tokens(Tokenizer.load(path, None), num_texts=100)
