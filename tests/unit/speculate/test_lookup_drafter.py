"""Test the drafter of an engine: what it knows of a sequence, and what it keeps of an answer."""

from typing import Any

from mie.config.params.sampling import SamplingParams
from mie.config.speculation import speculation_of
from mie.sched.sequence import Request, Sequence
from mie.speculate.costs import COSTS
from mie.speculate.drafter import LookupDrafter


def drafter_of(method: str = "suffix", most_tokens: int = 1000, **keys: Any) -> LookupDrafter:
    config = speculation_of({"method": method, "adaptive": False, **keys})
    assert config is not None
    return LookupDrafter(config, COSTS["jit"], most_tokens)


def sequence(prompt: list[int], output: list[int], **labels: Any) -> Sequence:
    params = SamplingParams(max_tokens=99)
    request = Request("r", prompt, params, number=0, **labels)
    request.sequences[0].token_ids += output
    return request.sequences[0]


def ended(seq: Sequence, reason: Any = "stop") -> Sequence:
    seq.finish_reason = reason
    return seq


def test_drafts_follow_the_tokens_of_a_sequence_as_it_grows():
    drafter = drafter_of("ngram", num_speculative_tokens=3)
    seq = sequence([1, 2, 3, 4], [1, 2])
    assert drafter.may_draft(seq)
    assert [*drafter.propose(seq, 9, 1, 1)] == [3, 4, 1]
    assert [*drafter.propose(seq, 2, 1, 1)] == [3, 4]
    seq.token_ids += [7]
    assert not drafter.may_draft(seq)
    assert [*drafter.propose(seq, 9, 1, 1)] == []
    seq.token_ids += [1, 2]
    assert [*drafter.propose(seq, 2, 1, 1)] == [7, 1]


def test_choices_of_a_request_have_their_own_tokens():
    drafter = drafter_of("ngram", num_speculative_tokens=1)
    request = Request("r", [1, 2, 3], SamplingParams(n=2, max_tokens=9), number=0)
    first, second = request.sequences
    first.token_ids += [1]
    second.token_ids += [2]
    assert [[*drafter.propose(seq, 1, 1, 1)] for seq in (first, second)] == [[2], [3]]


def test_a_prediction_follows_the_prompt():
    drafter = drafter_of("ngram", num_speculative_tokens=4)
    seq = sequence([1, 2, 3], [50], prediction=[50, 51, 52, 53])
    assert [*drafter.propose(seq, 9, 1, 1)] == [51, 52, 53]
    other = sequence([1, 2, 3], [50])
    assert [*drafter.propose(other, 9, 1, 1)] == []


def test_finished_answers_of_the_same_salt_are_continued():
    drafter = drafter_of()
    drafter.end(ended(sequence([1], [40, 41, 42, 43], cache_salt="a")))
    found = {
        salt: [*drafter.propose(sequence([9], [41], cache_salt=salt), 9, 1, 1)]
        for salt in ("a", "b", None)
    }
    assert found == {"a": [42, 43], "b": [], None: []}
    drafter.forget()
    assert [*drafter.propose(sequence([9], [41], cache_salt="a"), 9, 1, 1)] == []


def test_aborted_answers_are_not_kept_and_ngram_keeps_none():
    for drafter, reason in ((drafter_of(), "abort"), (drafter_of("ngram"), "stop")):
        drafter.end(ended(sequence([1], [40, 41, 42]), reason))
        assert [*drafter.propose(sequence([9], [41]), 9, 1, 1)] == []


def test_an_answer_longer_than_half_of_the_memory_is_not_kept():
    drafter = drafter_of(most_tokens=8)
    drafter.end(ended(sequence([1], [40, 41, 42, 43])))
    assert [*drafter.propose(sequence([9], [41]), 9, 1, 1)] == []
    drafter.end(ended(sequence([1], [40, 41])))
    assert [*drafter.propose(sequence([9], [40]), 9, 1, 1)] == [41]


def test_the_rule_shortens_drafts_that_were_wrong():
    config = speculation_of({"method": "ngram"})
    assert config is not None
    drafter = LookupDrafter(config, COSTS["jit"], 100)
    seq = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4])
    assert len(drafter.propose(seq, 9, 1, 1)) > 1
    for _ in range(30):
        drafter.observe(seq, 5, 0)
    assert len(drafter.propose(seq, 9, 1, 1)) == 0
