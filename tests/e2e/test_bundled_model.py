"""Check the promise of the bundled model's card on a part of the held-out prompts.

A story must use the four words of the prompt again up to 200 tokens later, so a wrong cache entry
shows in the text. The engine has few blocks here, and preempts.
"""

import json
from pathlib import Path

import pytest

from mie import LLM, SamplingParams

HELDOUT = Path(__file__).parents[1] / "data/tiny_heldout.jsonl"
PROMPTS = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
KINDS = ("name", "animal", "place", "object")


def faults(text: str, words: dict[str, str]) -> list[str]:
    """Return the kinds of words that a story lacks in its last four sentences, or has once only."""
    end = " ".join(text.replace("!", ".").replace("?", ".").split(".")[-5:])
    return [kind for kind in KINDS if words[kind] not in end or text.count(words[kind]) < 2]


def test_stories_keep_their_words_when_the_engine_is_short_of_blocks():
    llm = LLM("bundled", num_blocks=40, max_num_batched_tokens=48)
    prompts = [row for row in PROMPTS if not row["chat"]][:8]
    outputs = llm.generate(
        [row["prompt"] for row in prompts], SamplingParams(temperature=0, max_tokens=400)
    )
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    stories = [output.outputs[0].text for output in outputs]
    assert [faults(story, row) for story, row in zip(stories, prompts, strict=True)] == [[]] * 8
    assert llm.engine.stats.num_preemptions > 0
    assert llm.engine.scheduler.manager.num_used == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_from_another_prompt_is_a_fault(kind):
    row = PROMPTS[0]
    other = next(word for word in (prompt[kind] for prompt in PROMPTS) if word != row[kind])
    assert faults(row["reference"], row) == []
    assert kind in faults(row["reference"].replace(row[kind], other), row)
