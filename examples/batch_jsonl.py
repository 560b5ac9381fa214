"""Answer a file of requests in the form of OpenAI's batch files, and write a file of answers.

    python batch_jsonl.py requests.jsonl answers.jsonl

Without arguments it makes both files in a temporary folder. `mie generate --json --input FILE` does
the same and more on the command line.
"""

import json
import sys
import tempfile
from pathlib import Path

from mie import LLM, SamplingParams

TEMPLATE = {"method": "POST", "url": "/v1/chat/completions"}


def make_requests(path: Path) -> None:
    """Write three requests."""
    heroes = ("Mia the fox", "Tom the owl", "Nora the hedgehog")
    with path.open("w", encoding="utf-8") as file:
        for number, hero in enumerate(heroes, start=1):
            content = f"Tell me a story about {hero}, the mill and a bell."
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 40}
            print(json.dumps({"custom_id": f"story-{number}", **TEMPLATE, "body": body}), file=file)


def answer_requests(source: Path, target: Path) -> None:
    """Run all requests of ``source`` together; ``target`` gets an answer for each."""
    requests = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    conversations = [request["body"].pop("messages") for request in requests]
    params = [SamplingParams(temperature=0.7, seed=1, **request["body"]) for request in requests]
    outputs = LLM(model="bundled").chat(conversations, params)
    with target.open("w", encoding="utf-8") as file:
        for request, output in zip(requests, outputs, strict=True):
            record = {"custom_id": request["custom_id"], "text": output.outputs[0].text}
            print(json.dumps(record), file=file)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) == 3:
            answer_requests(Path(sys.argv[1]), Path(sys.argv[2]))
        else:
            requests_path, answers_path = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
            make_requests(requests_path)
            answer_requests(requests_path, answers_path)
            print(answers_path.read_text(encoding="utf-8"), end="")
