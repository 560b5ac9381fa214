"""The law of the router, on random replicas, loads and prompts."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mie.frontend.routing import MAX_PREFIX_BYTES, Key, PrefixRouter, beginning_of, best, ranking

NAMES = st.lists(st.integers(0, 99).map("replica {}".format), min_size=1, max_size=12, unique=True)
LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=9).map(
    lambda counts: {f"replica {number}": count for number, count in enumerate(counts)}
)
KEYS = st.binary(min_size=16, max_size=16)


def is_busy(loads: dict[str, int], replica: str, slack: int) -> bool:
    """The definition: so many requests above the mean."""
    return loads[replica] * len(loads) >= sum(loads.values()) + slack * len(loads)


@given(LOADS, KEYS, KEYS, st.integers(1, 9))
def test_a_beginning_stays_on_its_replica_while_that_one_has_room(loads, key, other, slack):
    home = best(key, loads)
    chosen = PrefixRouter(slack=slack).choose(Key(key, other), loads)
    assert (chosen == home) == (not is_busy(loads, home, slack))
    assert not is_busy(loads, chosen, slack)


@given(LOADS, KEYS, KEYS, st.integers(1, 9))
def test_what_a_busy_replica_cannot_take_goes_to_the_less_loaded_of_two(loads, key, other, slack):
    home = best(key, loads)
    if not is_busy(loads, home, slack):
        return
    others = [replica for replica in ranking(other, loads) if replica != home]
    while all(is_busy(loads, replica, slack) for replica in others[:2]):
        others = others[2:]
    chosen = PrefixRouter(slack=slack).choose(Key(key, other), loads)
    assert chosen in others[:2]
    assert loads[chosen] == min(loads[replica] for replica in others[:2])


@given(NAMES, st.lists(KEYS, min_size=1, max_size=60), st.data())
def test_only_the_share_of_a_replica_that_leaves_or_joins_moves(names, keys, data):
    one = data.draw(st.sampled_from(names))
    others = [name for name in names if name != one]
    for key in keys:
        if others and best(key, names) != one:
            assert best(key, others) == best(key, names)
        assert [name for name in ranking(key, names) if name != one] == ranking(key, others)


@given(NAMES, KEYS, st.randoms(use_true_random=False))
def test_routers_agree_however_they_list_the_replicas(names, key, random):
    shuffled = random.sample(names, len(names))
    assert ranking(key, names) == ranking(key, shuffled)
    assert best(key, shuffled) == ranking(key, names)[0]


TEXT = st.text(max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(["prompt", "messages", "input", "system", "instructions", "n"])


@given(st.dictionaries(FIELDS, JSON))
def test_any_body_has_a_beginning(body: dict[str, Any]):
    assert 0 < len(beginning_of(body)) <= MAX_PREFIX_BYTES


@given(st.lists(st.integers(0, 9), min_size=8), st.lists(st.integers(0, 9)), st.integers(1, 8))
def test_only_the_first_bytes_count(prefix, rest, size):
    router = PrefixRouter(prefix_bytes=3 * size)  # a token of one digit takes three bytes of JSON
    one, other = ({"prompt": [*prefix, *more]} for more in ([], rest))
    assert router.key(beginning_of(one)).home == router.key(beginning_of(other)).home
