"""Check the promises of the bundled model's card, on a part of the held-out prompts.

A story must use the prompt's four words again up to 200 tokens later, so a wrong cache entry shows
in the text. The engine has few blocks here, and preempts.
"""

import sys
from pathlib import Path

import pytest

from mie import LLM, SamplingParams
from mie.checkpoint.config import ModelConfig
from mie.checkpoint.locate import locate_model
from mie.checkpoint.tensors import num_parameters

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "tiny_model"))
import evaluate as checker

MILLION = 1_000_000


def test_stories_keep_their_words_when_the_engine_is_short_of_blocks():
    llm = LLM("bundled", num_blocks=70, max_num_batched_tokens=48)
    prompts = checker.read_prompts(checker.DATA)[:24]
    texts = checker.generate(llm, prompts, temperature=0)
    results = checker.judge(prompts, texts, checker.read_lists(checker.DATA))
    wrong = [(story.text, faults) for story, faults in results if faults]
    assert len(wrong) <= 1, wrong
    assert llm.engine.stats.num_preemptions > 0
    assert llm.engine.scheduler.manager.num_used == 0


def test_the_checker_sees_a_word_from_another_prompt():
    prompts = checker.read_prompts(checker.DATA)[:4]
    lists = checker.read_lists(checker.DATA)
    for facts, other in zip(prompts, prompts[1:] + prompts[:1], strict=True):
        good = facts["reference"]
        head, _, tail = good.rpartition(facts["object"])
        spoiled = head + other["object"] + tail
        [(_, faults), (_, late_faults)] = checker.judge(
            [facts, facts], [(good, "stop"), (spoiled, "stop")], lists
        )
        assert not faults
        assert late_faults


def test_shape_and_card():
    directory = locate_model("bundled")
    config = ModelConfig.load(directory)
    assert config.architecture == "LlamaForCausalLM"
    assert config.head_dim == 64
    assert config.num_kv_heads < config.num_heads
    assert config.context_length >= 1024
    card = (directory / "README.md").read_text()
    for fact in (
        f"{num_parameters(config):,} parameters",
        "million tokens",
        "Perplexity",
        "of 200",
    ):
        assert fact in card, fact


@pytest.fixture(scope="module")
def llm():
    return LLM("bundled")


def test_the_model_answers_a_question_about_its_story(llm):
    story = "Tell me a story about Nora the hedgehog, the lighthouse and an umbrella."
    messages = [{"role": "user", "content": story}]
    params = SamplingParams(temperature=0, max_tokens=300)
    [answer] = llm.chat(messages, params, use_tqdm=False)
    assert answer.outputs[0].finish_reason == "stop"
    messages += [
        {"role": "assistant", "content": answer.outputs[0].text},
        {"role": "user", "content": "Where does the story happen?"},
    ]
    [reply] = llm.chat(messages, params, use_tqdm=False)
    assert "lighthouse" in reply.outputs[0].text
    assert reply.num_cached_tokens > 100, "the story is in the prefix cache"
