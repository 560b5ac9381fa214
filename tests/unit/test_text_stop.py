"""Test StopStrings case by case; property/ compares it with str.find."""

import pytest

from mie.errors import ConfigError
from mie.text.stream import StopStrings


def test_a_stop_string_across_three_pieces_is_found_and_removed() -> None:
    search = StopStrings(["</answer>"])
    assert search.add("yes</an") == ("yes", None)
    assert search.add("swe") == ("", None)
    assert search.add("r> and more") == ("", "</answer>")


def test_the_stop_string_is_included_on_request() -> None:
    search = StopStrings(["END"], include_stop_str_in_output=True)
    assert search.add("the EN") == ("the ", None)
    assert search.add("D.") == ("END", "END")


def test_a_false_start_is_released() -> None:
    search = StopStrings(["abc"])
    assert search.add("ab") == ("", None)
    assert search.add("ax") == ("abax", None)


def test_the_first_complete_one_wins_however_the_text_is_cut() -> None:
    for pieces in (["abcd"], ["ab", "cd"], ["a", "b", "c", "d"]):
        search = StopStrings(["abcd", "bc"])
        found = [search.add(piece)[1] for piece in pieces]
        assert [stop for stop in found if stop] == ["bc"]


def test_the_longer_of_two_that_end_together_wins() -> None:
    assert StopStrings(["c", "bc"]).add("abc") == ("a", "bc")


def test_nothing_comes_after_a_stop_string() -> None:
    search = StopStrings(["."])
    assert search.add("one. two") == ("one", ".")
    assert search.add("three.") == ("", None)
    assert search.flush() == ""


def test_a_long_stop_string_costs_one_look_per_character() -> None:
    search = StopStrings(["a" * 20_000 + "b"])
    emitted = "".join(search.add("a")[0] for _ in range(60_000))  # quadratic search: minutes
    assert len(emitted) == 40_000


def test_bad_stop_strings_are_refused() -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        StopStrings(["ok", ""])
    with pytest.raises(ConfigError, match="must be a list of strings"):
        StopStrings("END")


def test_a_stop_string_may_begin_in_exempt_text() -> None:
    search = StopStrings(["ab"])
    assert search.add("xa", exempt=2) == ("x", None)
    assert search.add("b") == ("", "ab")


def test_a_stop_string_that_ends_in_exempt_text_is_text() -> None:
    search = StopStrings(["ab", "abcd"])
    assert search.add("xabc", exempt=4) == ("x", None)
    assert search.add("e") == ("abce", None)
    assert search.add("ab.ab", exempt=2) == ("ab.", "ab")


def test_thousands_of_stop_strings_cost_no_more_for_a_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = [f"{prefix}{number:05}" for number in range(5000) for prefix in "ab"]
    search = StopStrings(stop)
    looked_up: list[object] = []
    automaton = search._automaton
    assert automaton is not None
    table = automaton._next

    class Counted(dict):  # type: ignore[type-arg]
        def get(self, key: object, default: object = None) -> object:
            looked_up.append(key)
            return dict.get(self, key, default)

    monkeypatch.setattr(automaton, "_next", Counted(table))
    text = "a0a00b000a0000b00x" * 100
    assert search.add(text) == (text, None)
    assert len(looked_up) <= 2 * len(text)
    assert search.add("x b04999")[1] == "b04999"


def test_forks_share_the_automaton_and_are_independent() -> None:
    search = StopStrings(["abc"])
    search.add("a")
    fork = search.fork()
    assert fork._automaton is search._automaton
    assert search.add("bc") == ("", "abc")
    assert fork.add("bx") == ("abx", None)
