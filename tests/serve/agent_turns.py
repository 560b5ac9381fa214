"""The turns of a coding agent that begins its system prompt with another line in each request.

The form of the requests is that of published captures of Claude Code: the line with ``cch``, parts
of the system prompt, tools, and a result of a tool in each turn. All texts are invented.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

LINE = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={:05x};"
PATTERN = "^x-anthropic-billing-header: "
HEADER = "x-mie-prefix-departs"
WORDS = "mill lake otter owl bell kite lamp bridge boat door key hill song leaf stone".split()  # noqa: SIM905
TOOL = {
    "name": "Read",
    "description": "Read a file.",
    "input_schema": {
        "type": "object",
        "properties": {"file_path": {"type": "string"}},
        "required": ["file_path"],
    },
}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The facts of an answer about its prompt."""

    num_prompt: int
    num_cached: int
    header: str | None
    departure: dict[str, Any] | None
    """The place where the prompt departs from the cache, of the ``usage``."""

    @property
    def num_computed(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.num_prompt - self.num_cached


def bodies(num_turns: int, num_words: int, num_result_words: int) -> list[dict[str, Any]]:
    """Return a request for each turn. The system prompt has ``num_words``, a result fewer."""
    rng = random.Random(0)

    def text(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count)) + "."

    rules = text(num_words)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Mend the mill."}]
    found = []
    for number in range(num_turns):
        if number:
            call = {"type": "tool_use", "id": f"toolu_{number}", "name": "Read"}
            call["input"] = {"file_path": f"{rng.choice(WORDS)}.py"}  # type: ignore[assignment]
            result = {"type": "tool_result", "tool_use_id": f"toolu_{number}"}
            messages += [
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [{**result, "content": text(num_result_words)}]},
            ]
        line = LINE.format(rng.randrange(16**5))
        found.append(
            {
                "max_tokens": 1,
                "stream": True,
                "system": [{"type": "text", "text": each} for each in (line, rules)],
                "messages": list(messages),
                "tools": [TOOL],
            }
        )
    return found


def replay(client: httpx2.Client, requests: Sequence[dict[str, Any]]) -> list[Turn]:
    """Send requests one after another, and return the facts of the answers.

    Raises:
        httpx2.HTTPStatusError: a request is refused.
    """
    return [_turn(client, body) for body in requests]


def _turn(client: httpx2.Client, body: dict[str, Any]) -> Turn:
    answer = client.post("/v1/messages?beta=true", json=body, headers={"x-mie-usage-details": "1"})
    answer.raise_for_status()
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:6] == "data: "]
    [usage] = [event["usage"] for event in events if event["type"] == "message_delta"]
    num_cached = usage["cache_read_input_tokens"]
    return Turn(
        num_prompt=usage["input_tokens"] + num_cached,
        num_cached=num_cached,
        header=answer.headers.get(HEADER),
        departure=usage["prefix_departs"],
    )


def on_the_page(client: httpx2.Client) -> list[int]:
    """Return the tokens at which prompts depart from other prompts, as the page is told."""
    step = client.get("/mie/state").raise_for_status().json()["step"]
    history = client.get("/mie/history", params={"until": step}).raise_for_status().text
    records = [json.loads(line) for line in history.splitlines() if line]
    events = [
        event for each in records for step in each.get("steps", ()) for event in step["events"]
    ]
    return [event[2] for event in events if event[0] == "depart" and event[3] == "other tokens"]


def faults(
    requests: Sequence[dict[str, Any]],
    turns: Sequence[Turn],
    shown: Sequence[int],
    *,
    is_ignored: bool,
    block_size: int,
) -> list[str]:
    """Return what differs from docs/disk_cache.md. ``shown`` are the places on the page."""
    found = []
    for number, turn in enumerate(turns[1:], start=1):
        what, place = f"turn {number + 1}", turn.departure or {}
        num_before = turns[number - 1].num_prompt
        if is_ignored:
            num_new = turn.num_prompt - num_before
            if turn.num_computed > num_new + block_size:
                found.append(f"{what} computed {turn.num_computed} tokens; {num_new} are new")
            if place and place["token"] < num_before - block_size:
                found.append(f"{what} departs at token {place['token']}")
            continue
        digit = requests[number]["system"][0]["text"][-2]  # the last one of the line's ``cch``
        if f"{digit};" not in place.get("got", ""):
            found.append(f"{what} departs at {place}, not in the first line")
        elif f"token {place['token']} of {turn.num_prompt}: " not in (turn.header or ""):
            found.append(f"{what} has the header {turn.header!r}")
        elif place["token"] not in shown:
            found.append(f"{what}: the page does not name token {place['token']}")
        if turn.num_computed < turn.num_prompt // 2:
            found.append(f"{what} found {turn.num_cached} tokens in spite of the first line")
    return found
