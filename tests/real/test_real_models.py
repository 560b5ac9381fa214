"""Run published models: what a user does with one, and the greedy texts of transformers.

`scripts/make_real_golden.py` has recorded the texts. No answer is compared with a taste, but for
one fact that SmolLM2 knows.
"""

import json
import re
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
from command_line import mie
from published_models import published

from mie import LLM, SamplingParams

GOLDEN = Path(__file__).parent / "golden"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city now.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def chat(client: httpx2.Client, *messages: dict[str, str], **options: Any) -> dict[str, Any]:
    """Return the body of the greedy answer to a conversation."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 40, **options}
    answer = client.post("/v1/chat/completions", json={"model": NAME, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# Numbers.


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
@pytest.mark.parametrize(("backend", "count"), [("jit", 50), ("numpy", 10)])
def test_greedy_texts_are_the_texts_of_transformers(model: str, backend: str, count: int) -> None:
    path = published(model)
    golden = GOLDEN / f"{model}.json"
    if not golden.exists():
        pytest.skip(f"{golden.name} is not recorded (scripts/make_real_golden.py)")
    facts = json.loads(golden.read_text(encoding="utf-8"))
    cases = facts["greedy"][:count]
    assert len(cases) == count
    params = SamplingParams(temperature=0, max_tokens=len(cases[0]["greedy"]), ignore_eos=True)
    llm = LLM(str(path), backend=backend, dtype="float32", max_model_len=256, max_num_seqs=50)
    prompts = [{"prompt_token_ids": case["ids"]} for case in cases]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [list(each.outputs[0].token_ids) for each in outputs]
    assert found == [case["greedy"] for case in cases]


def test_drafts_change_no_token(smollm2: Path) -> None:
    prompts = ["Roses are red,\nviolets are blue,\n" * 3, "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,"]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    texts, drafts = [], []
    for guess in (None, {"method": "ngram", "num_speculative_tokens": 4}):
        llm = LLM(str(smollm2), max_model_len=128, speculative_config=guess)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts.append([output.outputs[0].text for output in outputs])
        drafts.append(sum(output.metrics.num_draft_tokens for output in outputs))
    assert texts[0] == texts[1]
    assert drafts[0] == 0 < drafts[1]


def test_preempted_requests_give_the_tokens_of_a_large_pool(smollm2: Path) -> None:
    prompts = [f"{number} little ducks went out one day" for number in range(8)]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=48, ignore_eos=True)
    settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "block_size": 16}
    texts, preemptions = [], []
    for num_blocks in (64, 12):
        llm = LLM(str(smollm2), num_blocks=num_blocks, **settings)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts.append([output.outputs[0].text for output in outputs])
        preemptions.append(sum(output.metrics.num_preemptions for output in outputs))
    assert texts[0] == texts[1]
    assert preemptions[0] == 0 < preemptions[1]


def evaluated(text: Path, model: Path, *options: str | Path) -> dict[str, float]:
    """Return the numbers of ``mie eval``."""
    process = mie("eval", text, "--model", model, "--num-tokens", "512", "--json", *options)
    assert process.returncode == 0, process.stderr.decode()
    found: dict[str, float] = json.loads(process.stdout)
    return found


def test_eval_finds_the_file_equal_to_its_weights_in_float32(
    smollm2: Path, smollm2_f32: Path
) -> None:
    text = Path(__file__).parents[2] / "README.md"
    found = evaluated(text, smollm2, "--reference", smollm2_f32)
    assert found["mean_kl"] < 1e-9
    assert found["same_top"] == 1
    assert found["perplexity"] == pytest.approx(found["reference_perplexity"], rel=1e-6)


def test_rounding_costs_little_in_int8_and_more_in_int4(smollm2_f32: Path) -> None:
    text = Path(__file__).parents[2] / "README.md"
    int8, int4 = (evaluated(text, smollm2_f32, "--quantization", name) for name in ("int8", "int4"))
    assert 0 < int8["mean_kl"] < 0.01
    assert int8["mean_kl"] < int4["mean_kl"] < 1
    cache = evaluated(text, smollm2_f32, "--kv-cache-dtype", "int8")
    exact = evaluated(text, smollm2_f32)
    assert cache["perplexity"] != exact["perplexity"]
    assert cache["perplexity"] == pytest.approx(exact["perplexity"], rel=0.01)


# A server.


def test_a_chat_names_a_capital(client: httpx2.Client) -> None:
    body = chat(client, QUESTION)
    assert "Paris" in body["choices"][0]["message"]["content"]
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_stream_has_the_text_of_the_whole_answer(url: str, client: httpx2.Client) -> None:
    whole = chat(client, QUESTION)["choices"][0]["message"]["content"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as peer:
        chunks = peer.chat.completions.create(
            model=NAME, messages=[QUESTION], temperature=0, max_tokens=40, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len(pieces) > 3
    assert "".join(pieces) == whole


def test_a_later_turn_finds_the_earlier_ones_in_the_cache(client: httpx2.Client) -> None:
    content = "Name three animals that live in the sea, and say one sentence about each of them."
    question = {"role": "user", "content": content}
    first = chat(client, question)["choices"][0]["message"]
    turns = [question, {"role": "assistant", "content": first["content"]}]
    usage = chat(client, *turns, {"role": "user", "content": "Which is the largest?"})["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] / 2 < cached < usage["prompt_tokens"]


def test_answers_follow_a_schema_an_expression_and_a_choice(client: httpx2.Client) -> None:
    asked = {"role": "user", "content": "Describe a person as JSON."}
    schema = {"name": "person", "schema": PERSON, "strict": True}
    shape = {"type": "json_schema", "json_schema": schema}
    body = chat(client, asked, response_format=shape, temperature=1, seed=3, max_tokens=60)
    jsonschema.validate(json.loads(body["choices"][0]["message"]["content"]), PERSON)
    for outputs, expression in (
        ({"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2}"}, r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
        ({"choice": ["Paris", "London"]}, "Paris|London"),
    ):
        body = chat(client, QUESTION, structured_outputs=outputs)
        assert re.fullmatch(expression, body["choices"][0]["message"]["content"])


def test_a_required_call_has_arguments_of_the_tool(client: httpx2.Client) -> None:
    asked = {"role": "user", "content": "What is the weather in Oslo?"}
    options = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    body = chat(client, asked, max_tokens=80, **options)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    function: dict[str, Any] = WEATHER["function"]  # type: ignore[assignment]
    jsonschema.validate(json.loads(call["function"]["arguments"]), function["parameters"])


def test_the_page_shows_the_text_of_the_blocks(client: httpx2.Client) -> None:
    words = "Count the lighthouses of the coast from north to south, and name the tallest one."
    chat(client, {"role": "user", "content": words})
    for path in ("/", "/chat", "/story.html"):
        assert client.get(path).status_code == 200
    state = client.get("/mie/state").json()
    found = client.get("/mie/text", params={"blocks": ",".join(state["tree"])}).json()["blocks"]
    text = "".join(cell["text"] for cell in found.values() if cell)
    assert "lighthouses" in text


# A terminal.


def test_a_chat_of_twenty_turns_reaches_the_end_of_its_context(smollm2: Path) -> None:
    options = ("--temperature", "0", "--max-model-len", "256", "--max-tokens", "12")
    asked = b"".join(b"Tell me a fact about the number %d.\n" % number for number in range(20))
    process = mie("chat", smollm2, *options, "--when-full", "drop", stdin=asked)
    assert process.returncode == 0, process.stderr.decode()
    assert b"[the context of 256 tokens is full: forgot the oldest " in process.stderr
    kept = mie("chat", smollm2, *options, stdin=asked)
    assert kept.returncode == 1
    assert b"the context holds 256" in kept.stderr
    assert process.stdout.startswith(kept.stdout[:200])


def test_run_answers_a_question_with_the_models_sampling(smollm2: Path) -> None:
    process = mie("run", smollm2, "What is the capital of France?", "--max-tokens", "60")
    assert process.returncode == 0, process.stderr.decode()
    assert b"Paris" in process.stdout
    first = process.stderr.decode().splitlines()[0]
    assert first.startswith("[sampling defaults of conversations, as the model recommends none: ")
