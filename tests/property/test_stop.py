"""Check that stop strings in pieces behave as ``str.find`` on the whole text."""

import random

from hypothesis import example, given
from hypothesis import strategies as st
from small_tokenizers import BYTE_KINDS
from small_tokenizers import KINDS as OTHER_KINDS

from mie.text.stream import StopStrings, TextStream

KINDS = OTHER_KINDS | BYTE_KINDS
letters = st.text(alphabet="ab\n", max_size=12)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)
tokens_in_two_parts = given(
    st.lists(st.integers(0, 400), max_size=12),
    st.lists(st.integers(0, 400), min_size=1, max_size=12),
    stops,
    st.sampled_from([*KINDS]),
)


def by_find(text: str, stop: list[str], include: bool, after: int = 0) -> tuple[str, str | None]:
    """Return the text up to the first complete stop string, the longer of two that end together.

    A stop string counts if it ends ``after`` so many characters.
    """
    starts = [(text.find(s, max(0, after + 1 - len(s))), s) for s in stop]
    ends = [(start + len(s), -len(s), s) for start, s in starts if start >= 0]
    if not ends:
        return text, None
    end, _, found = min(ends)
    return text[: end if include else end - len(found)], found


@given(st.lists(letters, max_size=8), stops, st.booleans())
@example(["aa", "ab"], ["aab"], False)
@example(["abc", "abd"], ["abab", "abd"], False)
@example(["ab", "a"], ["aba", "ba"], False)
def test_pieces_equal_find_on_the_whole(pieces: list[str], stop: list[str], include: bool) -> None:
    search = StopStrings(stop, include)
    text, found = "", None
    for piece in pieces:
        peeked = search.peek(piece)
        more, hit = search.add(piece)
        assert peeked == hit
        text, found = text + more, found or hit
    text += search.flush()
    assert (text, found) == by_find("".join(pieces), stop, include)


@given(letters, stops)
def test_only_a_possible_start_of_a_stop_string_is_held(text: str, stop: list[str]) -> None:
    emitted, found = StopStrings(stop).add(text)
    if found is None:
        held = text[len(emitted) :]
        could_begin = [text[i:] for i in range(len(text) + 1)]
        longest = next(t for t in could_begin if not t or any(s.startswith(t) for s in stop))
        assert held == longest


@given(letters, letters, stops, st.booleans())
@example("xa", "a", ["aa"], False)
@example("aab", "b", ["ab", "bb"], False)
def test_a_stop_string_that_ends_in_exempt_text_does_not_count(
    early: str, late: str, stop: list[str], include: bool
) -> None:
    search = StopStrings(stop, include)
    first, none = search.add(early, exempt=len(early))
    more, found = search.add(late)
    assert none is None
    expected = by_find(early + late, stop, include, len(early))
    assert (first + more + search.flush(), found) == expected
    in_one = StopStrings(stop, include)
    text, found_in_one = in_one.add(early + late, exempt=len(early))
    assert (text + in_one.flush(), found_in_one) == expected


@tokens_in_two_parts
@example([3 + 0x0A], [300], ["\n"], "llama2")
@example([], [300], ["\n"], "llama2")
def test_only_new_text_is_searched(
    prompt: list[int], ids: list[int], stop: list[str], kind: str
) -> None:
    tokenizer = KINDS[kind]()
    before, after = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    if "\ufffd" in before or not after.startswith(before):
        return
    stream = TextStream(tokenizer, prompt, stop=stop)
    text, found = stream.add(ids)
    if found is None:
        more, found = stream.finish()
        text += more
    assert (text, found) == by_find(after[len(before) :], stop, include=False)


@tokens_in_two_parts
@example([3 + 0x0A], [300], ["\n"], "llama2")
@example([3 + 0x0A], [3 + 0x0A], ["\n", "\n\n"], "llama2")
def test_min_tokens_count_where_a_stop_string_ends(
    early: list[int], late: list[int], stop: list[str], kind: str
) -> None:
    tokenizer = KINDS[kind]()
    before, whole = tokenizer.decode(early), tokenizer.decode([*early, *late])
    if "\ufffd" in before or not whole.startswith(before):
        return
    stream = TextStream(tokenizer, stop=stop)
    text, found = "", None
    for position, token_id in enumerate([*early, *late]):
        more, found = stream.add([token_id], armed=position >= len(early))
        text += more
        if found is not None:
            break
    if found is None:
        more, found = stream.finish()
        text += more
    assert (text, found) == by_find(whole, stop, False, len(before))


@given(st.lists(st.integers(0, 400), max_size=30), stops, st.booleans(), st.sampled_from([*KINDS]))
def test_a_text_stream_stops_with_the_token_that_completes_a_stop_string(
    ids: list[int], stop: list[str], include: bool, kind: str
) -> None:
    tokenizer = KINDS[kind]()
    stream = TextStream(tokenizer, stop=stop, include_stop_str_in_output=include)
    text, found, used = "", None, 0
    while used < len(ids) and found is None:
        more, found = stream.add([ids[used]])
        text, used = text + more, used + 1
    if found is None:
        more, found = stream.finish()
        text += more
    else:
        decoded = tokenizer.decode(ids[: used - 1])
        # A character that is still open hides nothing, because only its end can complete a stop
        # string.
        assert by_find(decoded, stop, include)[1] is None
    assert (text, found) == by_find(tokenizer.decode(ids[:used]), stop, include)


@given(st.text(alphabet="ab \né猫🦄🫠", max_size=10), st.data(), st.sampled_from([*BYTE_KINDS]))
def test_a_stop_string_of_several_tokens_a_character_is_found_at_its_last_byte(
    text: str, data: st.DataObject, kind: str
) -> None:
    tokenizer = BYTE_KINDS[kind]()
    begin = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[begin : begin + data.draw(st.integers(1, 3))]
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not stop:
        return
    stream, written = TextStream(tokenizer, stop=[stop]), ""
    for token_id in ids:
        more, found = stream.add([token_id])
        written += more
        if found:
            break
    assert (written, found) == by_find(text, [stop], include=False)


def test_any_depth_of_falling_back_finds_what_find_finds() -> None:
    """Texts are joined beginnings of the stop strings, so a mismatch often falls back twice."""
    rng = random.Random(5)
    deep = 0
    for _ in range(1500):
        stop = ["".join(rng.choices("aab", k=rng.randint(2, 9))) for _ in range(rng.randint(1, 4))]
        parts = [word[: rng.randint(1, len(word))] for word in rng.choices(stop, k=4)]
        text = "".join(parts) + rng.choice("abx")
        search = StopStrings(stop)
        more, found = search.add(text)
        assert (more + search.flush(), found) == by_find(text, stop, include=False), (stop, text)
        borders = [n for n in range(1, len(stop[0])) if stop[0].startswith(stop[0][-n:])]
        deep += len(borders) > 1
    assert deep > 200, "many stop strings end with their own beginning in several ways"
