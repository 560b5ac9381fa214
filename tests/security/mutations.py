"""Mutate valid JSON values: one to three hostile changes, from a seed."""

import copy
import json
import random
from typing import Any

NUMBERS = [
    *(0, -1, 1, 2, 3, 7, 255, 1000, 10**6, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64),
    *(-(2**31), -(2**63), 10**8, 10**18, 10**30, 10**400, 10**999, -(10**400)),
    *(0.0, -0.0, 0.5, 1.5, -1.5, 1e-300, 5e-324, 1e300, 1.7e308, -1e308),
    *(float("inf"), -float("inf"), float("nan")),
]
TEXTS = [
    *("", " ", "a", "x" * 300, "x" * 50_000, "\0", "\x1b[2J", "\u202e", "あ" * 200, "\U0001f600"),
    *("..", "/", "../../etc/passwd", "/dev/zero", "null", "NaN", "True", "-1", "1e999"),
    *("F32", "BF16", "F64", "yarn", "linear", "llama3", "full_attention", "sliding_attention"),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "LlamaForCausalLM"),
    *("\ud800", "</s>", "{{ 1 }}", "%s", "{0}", "a.safetensors"),
]


def deep(depth: int) -> Any:
    """Return deeply nested lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def hostile(draw: random.Random) -> Any:
    """Return a value of the wrong kind for its place."""
    return draw.choice(
        [
            lambda: draw.choice(NUMBERS),
            lambda: draw.choice(NUMBERS),
            lambda: draw.choice(TEXTS),
            lambda: draw.choice([None, True, False, [], {}, [[]], [{}], {"": {}}]),
            lambda: [draw.choice(NUMBERS)] * draw.choice([1, 2, 3, 9, 1000]),
            lambda: [draw.choice(TEXTS)] * draw.choice([1, 2, 9]),
            lambda: {draw.choice(TEXTS): draw.choice(NUMBERS)},
            lambda: {"rope_type": draw.choice(TEXTS), "factor": draw.choice(NUMBERS)},
            lambda: deep(draw.choice([1, 5, 400])),
        ]
    )()


def mutated(value: Any, draw: random.Random) -> Any:
    """Return a copy of the value with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        places = list(containers(value))
        # A list of many numbers counts as one place, like an object of a few settings.
        change(draw.choice(places), draw, value)
    return value


def nudged(value: Any, draw: random.Random, keep: tuple[str, ...] = ()) -> Any:
    """Return a copy with one integer changed, which passes every check of shapes.

    Numbers under the names ``keep`` are unchanged.
    """
    value = copy.deepcopy(value)
    places = [
        (place, key)
        for place in containers(value)
        for key in (place if isinstance(place, dict) else range(len(place)))
        if type(place[key]) is int and key not in keep
    ]
    if places:
        place, key = draw.choice(places)
        place[key] = draw.choice([place[key] + 1, place[key] - 1, *range(9), 2**20, 2**40])
    return value


def containers(value: Any) -> Any:
    """Yield every object and list that is not empty, down to some depth."""
    stack = [(value, 0)]
    while stack:
        found, depth = stack.pop()
        if isinstance(found, dict | list) and found and depth < 8:
            yield found
            inner = found.values() if isinstance(found, dict) else found
            stack += [(x, depth + 1) for x in inner]


def change(place: Any, draw: random.Random, whole: Any) -> None:
    """Change an object or a list at one place."""
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    key = draw.choice(keys)
    kind = draw.choice(["replace"] * 5 + ["scale", "drop", "add", "move", "repeat"])
    if kind == "scale" and isinstance(place[key], int | float):
        place[key] = place[key] * draw.choice([-1, 0, 2, 3, 1000]) + draw.choice([-1, 0, 1])
    elif kind == "drop" and len(place) > 1:
        del place[key]
    elif kind == "add" and isinstance(place, dict):
        place[draw.choice([*TEXTS, *whole] if isinstance(whole, dict) else TEXTS)] = hostile(draw)
    elif kind == "move":
        place[key] = copy.deepcopy(place[draw.choice(keys)])
    elif kind == "repeat" and isinstance(place, list) and len(place) < 1000:
        place.extend(copy.deepcopy(place) * draw.choice([1, 2, 20]))
    else:
        place[key] = hostile(draw)


def text_of(value: Any, draw: random.Random) -> str:
    """Return the value as JSON, occasionally with a duplicate key, which JSON allows."""
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5)
    if any("\ud800" <= character < "\ue000" for character in text):
        text = json.dumps(value)  # UTF-8 has no unpaired surrogates, but JSON escapes do
    if draw.random() < 0.05 and isinstance(value, dict) and value:
        key = json.dumps(draw.choice(list(value)))
        text = f"{text[:-1]}, {key}: {json.dumps(hostile(draw))}}}"
    return text
