"""Requests of coding agents and other clients, replayed: `data/agents.yaml`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_answers import answering
from tables import yaml_table

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

CALLS = yaml_table("agents")
ENDS = ("message_stop", "response.completed", "response.incomplete", "[DONE]", '"done": true')
"""The last event or line of a stream, one for each dialect."""


@pytest.mark.parametrize("client", CALLS)
def test_every_request_of_a_client_is_served(server: Any, client: str):
    for call in CALLS[client]:
        headers = {} if call.get("has_no_type") else {"content-type": "application/json"}
        content = json.dumps(call["body"]).encode()
        with answering(server.engine, "Done."):
            answer = server.client.post(call["post"], content=content, headers=headers)
        assert answer.status_code == 200, (call["why"], answer.text)
        ignored = answer.headers.get("x-mie-ignored", "")
        names = [name for name in ignored.split(",") if name]
        assert sorted(names) == sorted(call.get("ignored", [])), call["why"]
        if call["body"].get("stream"):
            assert any(end in answer.text for end in ENDS), call["why"]
            assert '"error": {' not in answer.text
        else:
            assert answer.json()["model" if "count" not in call["post"] else "input_tokens"]
