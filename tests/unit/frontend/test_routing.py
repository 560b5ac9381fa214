"""The router's notion of the beginning of a request."""

from typing import Any

import pytest

from mie.frontend.routing import PrefixRouter, beginning_of

SYSTEM = {"role": "system", "content": "You answer in one sentence."}
OTHERS = [f"replica {number}" for number in range(8)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def same(one: dict[str, Any], other: dict[str, Any], **options: Any) -> bool:
    router = PrefixRouter(**options)
    return router.key(beginning_of(one)).home == router.key(beginning_of(other)).home


def test_all_turns_of_a_conversation_have_one_key():
    opening = [SYSTEM, user("Tell me about Mia.")]
    answer = {"role": "assistant", "content": "Mia is a fox."}
    later = [*opening, answer, user("Go on.")]
    assert same({"messages": opening}, {"messages": later, "temperature": 0})
    assert beginning_of({"messages": opening}) == beginning_of({"messages": later})
    assert same({"input": opening}, {"input": later})
    assert not same({"messages": opening}, {"messages": [SYSTEM, user("Tell me about Tom.")]})


def test_conversations_share_a_key_if_their_system_prompt_is_longer_than_the_prefix():
    one, other = [SYSTEM, user("Mia")], [SYSTEM, user("Tom")]
    assert same({"messages": one}, {"messages": other}, prefix_bytes=32)
    assert not same({"messages": one}, {"messages": other})


@pytest.mark.parametrize("prompt", ["a" * 40, [7] * 40, ["a" * 40, "b"], [[7] * 40, [8]]])
def test_only_the_first_bytes_of_a_prompt_count(prompt: Any):
    longer = prompt + "bcd" if isinstance(prompt, str) else [*prompt, prompt[0]]
    assert same({"prompt": prompt}, {"prompt": longer}, prefix_bytes=32)
    assert same({"prompt": prompt, "max_tokens": 1}, {"prompt": prompt, "max_tokens": 2})


def test_the_system_prompt_of_other_interfaces_counts():
    messages = {"messages": [user("Mia")]}
    assert not same({**messages, "system": "Be brief."}, {**messages, "system": "Be kind."})
    assert not same({"input": "Mia", "instructions": "Be brief."}, {"input": "Mia"})


def test_conversations_with_a_busy_home_spread_over_all_others():
    router = PrefixRouter(prefix_bytes=32)
    loads = dict.fromkeys(OTHERS, 10)
    keys = [
        router.key(beginning_of({"messages": [SYSTEM, user(f"I am user {number}.")]}))
        for number in range(100)
    ]
    [home] = {router.choose(key, loads) for key in keys}
    loads[home] = 30
    assert {router.choose(key, loads) for key in keys} == set(OTHERS) - {home}
