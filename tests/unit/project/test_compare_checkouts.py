"""Check that the comparison of two checkouts finds every difference."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import same_bits

ROOT = Path(same_bits.__file__).parents[1]

RESULT: dict[str, Any] = {
    "outputs": [[{"request_id": "0", "outputs": [{"token_ids": [4, 5], "logprob": -0.1}]}]],
    "events": [{"event": "admit", "seq": [0, 0]}, {"event": "step", "run_seconds": 0.5}],
    "metrics": {"mie:cow_copies 0": {"value": 3}},
}


def found(new: Any, tolerance: float = 0.0) -> list[str]:
    return list(same_bits.differences(RESULT, new, tolerance))


def changed(*path: Any, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(RESULT)
    place: Any = result
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return result


def test_a_seed_gives_the_same_scenarios():
    first, second = (
        [same_bits.Draw(f"3/{number}").scenario() for number in range(20)] for _ in range(2)
    )
    assert first == second
    assert json.loads(json.dumps(first, allow_nan=False)) == json.loads(json.dumps(second))
    assert {each["settings"]["backend"] for each in first} == {"jit", "numpy"}


def test_equal_results_have_no_differences_and_times_do_not_count():
    assert found(copy.deepcopy(RESULT)) == []
    assert found(changed("events", 1, "run_seconds", value=0.7)) == []


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        (("outputs", 0, 0, "outputs", 0, "token_ids", 1), 6, ".token_ids[1]: 5, 6"),
        (("events", 0, "seq"), [0, 1], ".events[0].seq[1]: 0, 1"),
        (("events", 0, "event"), "resume", ".events[0].event: admit, resume"),
        (("events",), RESULT["events"][:1], ".events: "),
        (("metrics", "mie:cow_copies 0", "value"), 4, ".value: 3, 4"),
        (("metrics", "more"), {}, ".metrics.more: absent, {}"),
    ],
)
def test_a_difference_is_named_by_its_place(path: tuple[Any, ...], value: Any, place: str):
    [line] = found(changed(*path, value=value))
    assert place in line


def test_a_float_may_differ_only_within_the_tolerance():
    near = changed("outputs", 0, 0, "outputs", 0, "logprob", value=-0.1 - 1e-6)
    assert found(near, 1e-5) == []
    assert len(found(near, 1e-7)) == 1
    next_float = changed("outputs", 0, 0, "outputs", 0, "logprob", value=-0.10000000000000002)
    assert len(found(next_float)) == 1


@pytest.mark.slow
def test_a_checkout_equals_itself(capsys: pytest.CaptureFixture[str]):
    assert same_bits.main([str(ROOT), str(ROOT), "--scenarios", "2"]) == 0
    assert "equal on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "."), "'nowhere' is neither a directory nor a commit"),
        ((".", ".", "--scenarios", "0"), "--scenarios is 0; compare at least 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        same_bits.main([*arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
