"""Send bodies of the largest size to an app of this process, and measure the CPU time of each.

A body repeats one unit as often as 8 MiB allow: in every list, object and text of every route.
"""

import asyncio
import json
import time
from typing import Any

import httpx2

from mie import AsyncLLM
from mie.serve.app import create_app
from mie.serve.config import ServeConfig

MAX_BYTES = ServeConfig().max_request_bytes
COMPLETION = '"prompt": "a", "max_tokens": 1'
CHAT = '"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1'
OLLAMA = '"messages": [{"role": "user", "content": "hi"}]'
RESPONSE = '"input": "hi", "max_output_tokens": 1'
USER = '"max_tokens": 1, "messages": [{"role": "user", "content": ['
ASSISTANT = USER.replace("user", "assistant")
TEXT = '{"type":"text","text":""}'
EMPTY_TURN = '{"role":"user","content":""}'
KEYS = '"%x":[]'
"""A unit with a number, so that all keys of an object differ."""

CASES: dict[str, list[tuple[str, str, str]]] = {
    "/v1/completions": [
        (f'{{{COMPLETION}, "stop": [', '"a"', "]}"),
        (f'{{{COMPLETION}, "stop": "', "a", '"}'),
        (f'{{{COMPLETION}, "stop_token_ids": [', "5", "]}"),
        (f'{{{COMPLETION}, "stop_token_ids": [', "9" * 4299, "]}"),
        (f'{{{COMPLETION}, "bad_words": [', '"a"', "]}"),
        (f'{{{COMPLETION}, "allowed_token_ids": [', "5", "]}"),
        (f'{{{COMPLETION}, "logit_bias": {{', '"%d":1', "}}"),
        (f'{{{COMPLETION}, "structured_outputs": {{"choice": [', '"%x"', "]}}"),
        (f'{{{COMPLETION}, "structured_outputs": {{"json": {{"enum": [', "1", "]}}}"),
        (f'{{{COMPLETION}, "suffix": [', "[]", "]}"),
        (f'{{{COMPLETION}, "metadata": {{', KEYS, "}}"),
        (f'{{{COMPLETION}, "unknown": [', "[]", "]}"),
        (f"{{{COMPLETION}, ", '"%x":1', "}"),
        ('{"max_tokens": 1, "prompt": "', "a", '"}'),
        ('{"max_tokens": 1, "prompt": [', "5", "]}"),
        ('{"max_tokens": 1, "prompt": [', "[5]", "]}"),
        ('{"max_tokens": 1, "prompt": [', f"[{'5,' * 1019}5]", "]}"),
        ('{"max_tokens": 1, "truncate_prompt_tokens": 5, "prompt": [', f"[{'5,' * 65000}5]", "]}"),
    ],
    "/v1/chat/completions": [
        ('{"max_tokens": 1, "messages": [', '{"role":"user","content":""}', "]}"),
        (f"{{{USER}", TEXT, "]}]}"),
        ('{"messages": [{"role": "tool", "content": [', "[]", "]}]}"),
        ('{"messages": [{"role": "assistant", "tool_calls": [', "{}", "]}]}"),
        (f'{{{CHAT}, "tools": [', '{"function":{"name":"f"}}', "]}"),
        (f'{{{CHAT}, "tools": [{{"function": {{"name": "f", "parameters": {{', KEYS, "}}}]}"),
        (f'{{{CHAT}, "response_format": {{"type": "json_object", ', '"%x":1', "}}"),
        (f'{{{CHAT}, "response_format": {{"type": "json_object", "schema": {{', KEYS, "}}}"),
        (f'{{{CHAT}, "chat_template_kwargs": {{', KEYS, "}}"),
        (f'{{{CHAT}, "chat_template_kwargs": {{"a": [', "[]", "]}}"),
    ],
    "/v1/responses": [
        ('{"input": [', EMPTY_TURN, "]}"),
        ('{"input": [{"role": "user", "content": [', '{"type":"input_text","text":""}', "]}]}"),
        (
            '{"input": [{"type": "reasoning", "content": [',
            '{"type":"reasoning_text","text":""}',
            "]}]}",
        ),
        (f'{{{RESPONSE}, "include": [', '"message.output_text.logprobs"', "]}"),
        (f'{{{RESPONSE}, "tools": [', '{"type":"function","name":"f"}', "]}"),
        (f'{{{RESPONSE}, "metadata": {{', KEYS, "}}"),
        (f'{{{RESPONSE}, "text": {{"format": {{"type": "json_object", "schema": {{', KEYS, "}}}}"),
    ],
    "/v1/messages": [
        ('{"max_tokens": 1, "messages": [', EMPTY_TURN, "]}"),
        (f"{{{USER}", TEXT, "]}]}"),
        (f"{{{USER}", '{"type":"tool_result","tool_use_id":""}', "]}]}"),
        (f"{{{ASSISTANT}", '{"type":"thinking","thinking":""}', "]}]}"),
        (f"{{{ASSISTANT}", '{"type":"tool_use","id":"","name":"f","input":{}}', "]}]}"),
        (f'{{{CHAT}, "system": [', TEXT, "]}"),
        (f'{{{CHAT}, "tools": [', '{"name":"f","input_schema":{}}', "]}"),
        (f'{{{CHAT}, "stop_sequences": [', '"a"', "]}"),
        (
            f'{{"max_tokens": 1, "messages": [{{"role": "user", "content": "{"a" * 6 * 10**6}"}}, ',
            EMPTY_TURN,
            "]}",
        ),
    ],
    "/v1/messages/count_tokens": [('{"messages": [{"role": "user", "content": [', TEXT, "]}]}")],
    "/api/chat": [
        ('{"messages": [', EMPTY_TURN, "]}"),
        ('{"messages": [{"role": "user", "content": "', "a", '"}]}'),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [',
            '{"function":{"name":"f","arguments":{}}}',
            "]}]}",
        ),
        (f'{{{OLLAMA}, "tools": [', '{"function":{"name":"f"}}', "]}"),
        (f'{{{OLLAMA}, "format": {{', KEYS, "}}"),
        (f'{{{OLLAMA}, "images": [', "[]", "]}"),
        (f'{{{OLLAMA}, "options": {{', '"%x":1', "}}"),
        (f'{{{OLLAMA}, "options": {{"stop": [', '"a"', "]}}"),
    ],
    "/api/generate": [
        ('{"prompt": "', "a", '"}'),
        ('{"raw": true, "prompt": "', "a", '"}'),
        ('{"prompt": "a", "options": {"num_predict": 1}, "system": "', "a", '"}'),
        ('{"prompt": "a", "context": [', "5", "]}"),
    ],
    "/api/show": [('{"verbose": [', "[]", "]}")],
    "/v1/load_lora_adapter": [
        ('{"lora_path": "a", "lora_name": "', "a", '"}'),
        ('{"lora_name": "a", "lora_path": "', "a", '"}'),
        ('{"lora_name": "a", "lora_path": "a", ', '"%x":1', "}"),
    ],
    "/v1/unload_lora_adapter": [('{"lora_name": "', "a", '"}')],
    "/tokenize": [('{"prompt": "', "a", '"}'), ('{"messages": [', EMPTY_TURN, "]}")],
    "/detokenize": [('{"tokens": [', "5", "]}")],
    "/apply-template": [('{"messages": [{"role": "user", "content": [', TEXT, "]}]}")],
}


def body_of(head: str, unit: str, tail: str) -> bytes:
    """Return a body that repeats a unit until it has the largest size."""
    room = MAX_BYTES - len(head) - len(tail)
    if "%" in unit:
        longest = len(unit % 1_000_000) + 1
        units = ",".join(unit % number for number in range(room // longest))
    elif head.endswith('"') and len(unit) == 1:
        units = unit * room
    else:
        units = ",".join([unit] * (room // (len(unit) + 1)))
    return f"{head}{units}{tail}".encode()


def run(path: str, first: int, last: int) -> str:
    """Send some bodies of a route, and return CPU seconds, status and error of each as JSON."""
    return json.dumps(asyncio.run(_run(path, first, last)))


async def _run(path: str, first: int, last: int) -> list[dict[str, Any]]:
    found = []
    async with AsyncLLM("bundled", num_blocks=256, num_threads=1, enable_lora=True) as engine:
        app = create_app(engine, ServeConfig(allow_runtime_lora_updating=True))
        async with app.router.lifespan_context(app):
            transport = httpx2.ASGITransport(app)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                for head, unit, tail in CASES[path][first:last]:
                    body = body_of(head, unit, tail)
                    before = time.process_time()
                    answer = await client.post(
                        path, content=body, headers={"content-type": "application/json"}
                    )
                    seconds = time.process_time() - before
                    found.append(
                        {
                            "case": f"{head[-40:]}{unit[:40]}",
                            "bytes": len(body),
                            "seconds": seconds,
                            "status": answer.status_code,
                            "text": answer.text[:500],
                        }
                    )
    return found
