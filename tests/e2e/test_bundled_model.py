"""Check the promises of the bundled model's card, on a part of the held-out prompts.

A story must use the prompt's four words again up to 200 tokens later, so a wrong cache entry shows
in the text. The engine has few blocks here, and preempts.
"""

import sys
from pathlib import Path

import pytest

from mie import LLM

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "tiny_model"))
import evaluate as checker
import unseen


def test_stories_keep_their_words_when_the_engine_is_short_of_blocks():
    llm = LLM("bundled", num_blocks=40, max_num_batched_tokens=48)
    prompts = checker.read_prompts(checker.DATA)[:8]
    texts = checker.generate(llm, prompts, temperature=0)
    results = checker.judge(prompts, texts, checker.read_lists(checker.DATA))
    wrong = [(story.text, faults) for story, faults in results if faults]
    assert not wrong
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


@pytest.mark.slow
def test_unseen_words_are_kept_and_requests_about_a_story_are_followed():
    prompts, lists = checker.read_prompts(checker.DATA), checker.read_lists(checker.DATA)
    report = unseen.measure(LLM("bundled"), prompts, lists)
    limits = dict.fromkeys(("names", "animals", "places", "objects"), 29) | {"all four": 27}
    assert all(report["words"][kind]["kept"] >= least for kind, least in limits.items()), report
    assert all(kind["right"] >= 4 for kind in report["requests"].values()), report
    assert sum(kind["right"] for kind in report["requests"].values()) >= 28, report
