"""Generate with drafts through `LLM`: the same answers, fewer steps, and the numbers of drafts."""

import pytest
from compiled import needs_numba
from emulated import needs_compiler

from mie import LLM, SamplingParams
from mie.errors import RequestError

REPETITIVE = [5, 6, 7, 8, 9] * 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
FIXED = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


def llm_of(model, backend, drafts, **settings):
    if backend == "cupy-emulated":
        settings |= {"batch_invariant": True, "dtype": "float32"}
    return LLM(
        str(model.directory),
        backend=backend,
        skip_tokenizer_init=True,
        speculative_config=drafts,
        num_blocks=64,
        block_size=4,
        **settings,
    )


def answers(llm, **params):
    chosen = SamplingParams(max_tokens=14, ignore_eos=True, detokenize=False, logprobs=1, **params)
    prompts = [{"prompt_token_ids": REPETITIVE}, {"prompt_token_ids": [11, 12, 11, 12, 11]}]
    outputs = llm.generate(prompts, chosen, use_tqdm=False)
    return [
        (choice.token_ids, choice.finish_reason, choice.cumulative_logprob)
        for output in outputs
        for choice in output.outputs
    ]


CASES = [
    ("llama", "numpy"),
    pytest.param("gemma3", "jit", marks=needs_numba),
    pytest.param("llama", "cupy-emulated", marks=needs_compiler),
    pytest.param("gemma3", "cupy-emulated", marks=[needs_compiler, pytest.mark.slow]),
]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_drafts_change_no_bit(tiny, name, backend):
    # Forced tokens repeat the prompt, so that there are right drafts.
    forced = {"trace_decode_token_ids": [*REPETITIVE[:9]]}
    plain, drafted = (llm_of(tiny[name], backend, drafts) for drafts in (None, FIXED))
    for params in (
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 3, "n": 2},
        {"temperature": 0.0, **forced},
        {"temperature": 0.0, "repetition_penalty": 1.2, **forced},
    ):
        expected, found = answers(plain, **params), answers(drafted, **params)
        if backend == "numpy":  # products of more rows may round otherwise
            expected, found = ([each[:2] for each in some] for some in (expected, found))
        assert found == expected
    stats = drafted.engine.scheduler.speculation.stats
    assert stats.num_accepted_tokens > 0
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    assert drafted.engine.stats.num_steps < plain.engine.stats.num_steps
    assert plain.engine.scheduler.speculation is None


def test_a_prediction_makes_drafts_and_changes_no_answer():
    prompt = "Tell me a story."
    plain = LLM("bundled", num_blocks=64).generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0]
    llm = LLM("bundled", num_blocks=64, speculative_config={"method": "ngram"})
    steps = []
    for text in (None, plain.text, "It is " + plain.text[:40]):
        before = llm.engine.stats.num_steps
        given = {"prompt": prompt, "prediction": text}
        [output] = llm.generate(given, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == plain.token_ids
        steps.append(llm.engine.stats.num_steps - before)
    assert steps[1] < steps[2] < steps[0]
    assert steps[1] < len(plain.token_ids) / 3


def test_a_prediction_is_a_text():
    with pytest.raises(RequestError, match="prediction must be a string; got 3"):
        LLM("bundled", num_blocks=8).generate({"prompt": "a", "prediction": 3}, use_tqdm=False)
