"""Lines that `--ignore-prompt-lines` leaves out of the prompts of every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest
from edge_helpers import MESSAGES, client_of, load

from mie.serve.config import ServeConfig

LINE = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
PARTS = [{"type": "text", "text": LINE}, {"type": "text", "text": "You mend programs."}]
CHAT = {"messages": [{"role": "system", "content": f"{LINE}\nYou mend programs."}, *MESSAGES]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": {"system": PARTS, "messages": MESSAGES},
    "/v1/responses": {"instructions": f"{LINE}\nYou mend programs.", "input": "Tell me a story."},
    "/api/chat": {**CHAT, "stream": False},
    "/api/generate": {"system": CHAT["messages"][0]["content"], "prompt": "Tell me a story."},
}


async def test_no_dialect_shows_the_line_to_the_model(caplog: pytest.LogCaptureFixture):
    engine = load(ignore_prompt_lines="^x-anthropic-billing-header: ")
    caplog.set_level("INFO", "mie.access")
    try:
        async with client_of(engine, ServeConfig(log_prompts=True)) as client:
            prompts = [await prompt_of(client, caplog, path, body) for path, body in BODIES.items()]
            counted = await client.post("/v1/messages/count_tokens", json=BODIES["/v1/messages"])
            shown = await client.post("/apply-template", json=CHAT)
    finally:
        engine.shutdown()
    assert prompts == [shown.json()["prompt"]] * len(BODIES)
    assert "You mend programs." in prompts[0]
    assert "billing" not in prompts[0]
    assert counted.json()["input_tokens"] < len(LINE)


async def prompt_of(client: Any, caplog: Any, path: str, body: dict[str, Any]) -> str:
    """The prompt that the access log has for a request."""
    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    more = {"options": {"num_predict": 1}} if "api" in path else {limit: 1}
    caplog.clear()
    answer = await client.post(path, json={**body, **more})
    assert answer.status_code == 200, answer.text
    [facts] = [record.facts for record in caplog.records if record.name == "mie.access"]
    [prompt] = json.loads(facts["prompts"])
    return prompt
