"""StopStrings, case by case (equality with str.find is in property/)."""

import pytest

from mie.errors import ConfigError
from mie.text.stop import StopStrings


def test_a_stop_string_across_three_pieces_is_found_and_removed() -> None:
    search = StopStrings(["</answer>"])
    assert search.add("yes</an") == ("yes", None)
    assert search.add("swe") == ("", None)
    assert search.add("r> and more") == ("", "</answer>")


def test_the_stop_string_stays_on_request() -> None:
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


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert StopStrings(["c", "bc"]).add("abc") == ("a", "bc")


def test_nothing_comes_after_a_stop_string() -> None:
    search = StopStrings(["."])
    assert search.add("one. two") == ("one", ".")
    assert search.add("three.") == ("", None)
    assert search.flush() == ""


def test_a_long_stop_string_costs_one_look_per_character() -> None:
    search = StopStrings(["a" * 20_000 + "b"])
    emitted = "".join(search.add("a")[0] for _ in range(60_000))  # quadratic: minutes
    assert len(emitted) == 40_000


def test_bad_stop_strings_are_refused() -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        StopStrings(["ok", ""])
    with pytest.raises(ConfigError, match="must be a list of strings"):
        StopStrings("END")


def test_what_passes_while_unarmed_begins_no_stop_string() -> None:
    search = StopStrings(["ab"])
    assert search.add("xa") == ("x", None)
    assert search.add("a", armed=False) == ("aa", None)
    assert search.add("b") == ("b", None)
