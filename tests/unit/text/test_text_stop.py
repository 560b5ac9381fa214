"""Test the cost of StopStrings; property/ compares it with str.find."""

from mie.text.stream import StopStrings


def test_thousands_of_stop_strings_cost_no_more_for_a_character(monkeypatch) -> None:
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
