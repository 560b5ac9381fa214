"""Preemptions, prefix hits and copies are the same numbers on every surface."""

import asyncio
import json

from edge_helpers import load, server_of
from prometheus_client.parser import text_string_to_metric_families

PROMPT = "Once upon a time there was an otter who lived by a mill near a lake."
NAMES = ("num_preemptions", "num_recomputed_tokens", "num_copied_blocks")


async def test_response_log_line_metric_and_trace_agree(tmp_path, caplog):
    caplog.set_level("INFO", "mie.access")
    file = tmp_path / "trace.jsonl"
    with file.open("w", encoding="utf-8") as trace:
        # Two of these fit at once, and four are admitted.
        engine = load(num_blocks=8, trace=trace)
        async with server_of(engine) as running:
            body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
            posts = [
                running.client.post("/v1/completions", json={**body, "n": 1 + number % 2})
                for number in range(6)
            ]
            answers = await asyncio.gather(*posts)
            responses, text = answers, (await running.client.get("/metrics")).text
    answers = [response.json() for response in responses]
    ids = {response.headers["x-request-id"] for response in responses}
    in_responses = {name: sum(a["metrics"][name] for a in answers) for name in NAMES}
    in_responses["num_cached_tokens"] = sum(
        a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers
    )
    lines = [record.facts for record in caplog.records if record.name == "mie.access"]
    lines = [facts for facts in lines if facts["request_id"] in ids]
    assert len(lines) == len(answers)
    in_log = {name: sum(facts[name] for facts in lines) for name in in_responses}
    scraped = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    in_metrics = {
        "num_preemptions": scraped["vllm:num_preemptions_total"],
        "num_recomputed_tokens": scraped["mie:tokens_recomputed_total"],
        "num_copied_blocks": scraped["mie:cow_copies_total"],
        "num_cached_tokens": scraped["vllm:prompt_tokens_cached_total"],
    }
    assert in_responses == in_log == in_metrics
    assert in_responses["num_preemptions"] > 0
    assert in_responses["num_cached_tokens"] > 0
    assert in_responses["num_copied_blocks"] > 0
    kinds = [json.loads(line)["event"] for line in file.read_text().splitlines()]
    assert kinds.count("preempt") == in_responses["num_preemptions"]
    assert kinds.count("copy") == in_responses["num_copied_blocks"]
