"""A coding agent whose first line changes in each turn, with and without leaving the line out."""

import httpx2
import pytest
from agent_turns import PATTERN, Turn, bodies, faults, on_the_page, replay
from deadlines import PATIENCE
from live_server import live

from mie import AsyncLLM

BLOCK_SIZE = 8


@pytest.mark.parametrize("is_ignored", [False, True])
def test_the_token_is_named_and_only_new_tokens_are_computed_without_the_line(is_ignored: bool):
    requests = bodies(4, 30, 6)
    engine = AsyncLLM(
        "bundled",
        num_threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=256,
        ignore_prompt_lines=PATTERN if is_ignored else None,
    )
    try:
        with live(engine) as url, httpx2.Client(base_url=url, timeout=PATIENCE) as client:
            turns, shown = replay(client, requests), on_the_page(client)
    finally:
        engine.shutdown()
    assert faults(requests, turns, shown, is_ignored=is_ignored, block_size=BLOCK_SIZE) == []
    others = faults(requests, turns, shown, is_ignored=not is_ignored, block_size=BLOCK_SIZE)
    assert len(others) >= 3, "the check would not notice"


def test_a_place_that_the_page_or_the_header_lacks_is_a_fault():
    requests = bodies(2, 30, 6)
    digit = requests[1]["system"][0]["text"][-2]
    place = {"token": 40, "of": 90, "reason": "other tokens", "got": f"{digit};"}
    first = Turn(num_prompt=50, num_cached=0, header=None, departure=None)
    second = Turn(
        num_prompt=90, num_cached=40, header="token 40 of 90: other tokens", departure=place
    )
    check = {"is_ignored": False, "block_size": 8}
    assert faults(requests, [first, second], [40], **check) == []
    assert faults(requests, [first, second], [41], **check)
    assert faults(requests, [first, Turn(**{**vars(second), "header": None})], [40], **check)
