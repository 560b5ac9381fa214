"""Compare `LLM.beam_search` with brute force over the oracle's logits."""

import gc
import random

import naive
import pytest
from adapter_files import merged, random_adapter, write_peft
from audit import check_scheduler
from interrupts import KINDS, Injector, handlers

from mie import LLM, BeamSearchParams, LoRARequest
from mie.errors import ConfigError, RequestError, RequestFailedError

EOS = 3
PROMPT = [5, 9, 12, 30, 7, 21, 14]
OTHERS = [[17, 4, 33], PROMPT[:4], [8] * 9]


def load(model, **settings):
    settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, **settings}
    return LLM(model.directory, skip_tokenizer_init=True, dtype="float64", **settings)


@pytest.fixture
def llama(tiny):
    llm = load(tiny["llama"], batch_invariant=True)  # outputs of different batches are compared
    yield llm
    assert_nothing_is_held(llm)


def assert_nothing_is_held(llm):
    assert not llm.has_work
    check_scheduler(llm.engine.scheduler)
    assert llm.engine.scheduler.manager.num_used == 0


def assert_equal_to_brute_force(llm, model, prompts, limit=10**9, **params):
    outputs = llm.beam_search(prompts, BeamSearchParams(**params))
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = naive.beam_search(
            model.config, model.weights, prompt, params, eos={EOS}, limit=limit
        )
        assert_beams(output, expected)
    assert_nothing_is_held(llm)
    return outputs


def assert_beams(output, expected):
    found = [(beam.tokens, beam.cum_logprob, beam.finish_reason) for beam in output.sequences]
    assert [beam[::2] for beam in found] == [beam[::2] for beam in expected]
    assert [beam[1] for beam in found] == pytest.approx([beam[1] for beam in expected])


@pytest.mark.parametrize("family", ["llama", "mistral_window", "qwen2", "qwen3_tied"])
@pytest.mark.parametrize("width", [1, 3])
def test_beams_equal_those_of_brute_force(tiny, family, width):
    llm = load(tiny[family])
    assert_equal_to_brute_force(
        llm, tiny[family], [PROMPT, *OTHERS], beam_width=width, max_tokens=7
    )


@pytest.mark.parametrize(
    "params",
    [
        {"length_penalty": 0.0},
        {"length_penalty": 3.0},
        {"length_penalty": -2.0},
        {"ignore_eos": True},
        {"temperature": 0.3},
        {"temperature": 2.5, "length_penalty": 0.5},
        {"temperature": 1.0},
        {"max_tokens": 1},
        {"beam_width": 24, "max_tokens": 2},
    ],
    ids=str,
)
def test_parameters_have_the_same_effect_as_in_brute_force(llama, tiny, params):
    params = {"beam_width": 3, "max_tokens": 6, **params}
    assert_equal_to_brute_force(llama, tiny["llama"], [PROMPT, *OTHERS], **params)


def test_some_beams_end_with_eos_and_some_do_not(llama, tiny):
    prompts = [[first, 6] for first in range(4, 24)]
    outputs = assert_equal_to_brute_force(llama, tiny["llama"], prompts, beam_width=4, max_tokens=5)
    beams = [beam for output in outputs for beam in output.sequences]
    assert {(beam.finish_reason, beam.stop_reason) for beam in beams} == {
        ("stop", EOS),
        ("length", None),
    }
    for beam in beams:
        assert (beam.tokens[-1] == EOS) == (beam.finish_reason == "stop")


@pytest.mark.parametrize(
    ("caching", "mode", "seats"),
    [(True, "recompute", 2), (False, "swap", 2), (True, "swap", 8), (False, "recompute", 8)],
)
def test_a_small_pool_changes_nothing(tiny, caching, mode, seats):
    swap = {"swap_space": 100_000} if mode == "swap" else {}
    llm = load(
        tiny["llama"],
        num_blocks=6,
        max_num_seqs=seats,
        enable_prefix_caching=caching,
        preemption_mode=mode,
        **swap,
    )
    assert_equal_to_brute_force(llm, tiny["llama"], [PROMPT, *OTHERS], beam_width=4, max_tokens=9)


@pytest.mark.parametrize("caching", [True, False])
def test_a_beam_computes_the_tokens_after_its_last_full_block_again(tiny, caching):
    """The prompt has 10 full blocks and one token. Without the cache all tokens are computed."""
    llm = load(tiny["llama"], enable_prefix_caching=caching, num_blocks=64)
    steps = []
    llm.engine.observers.append(steps.append)
    prompt = [4 + i % 30 for i in range(41)]
    width, max_tokens = 4, 8
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
    llm.beam_search([prompt], params)
    lengths = range(42, 41 + max_tokens)
    num_computed = [(length - 1) % 4 + 1 if caching else length for length in lengths]
    assert [step.num_prefill_tokens for step in steps] == [41, *[width * n for n in num_computed]]
    assert_nothing_is_held(llm)


def test_a_beam_ends_at_the_limit_of_context_or_cache(tiny):
    params = {"beam_width": 2, "max_tokens": 99, "ignore_eos": True}
    short = load(tiny["llama"], max_model_len=12)
    assert_equal_to_brute_force(short, tiny["llama"], [PROMPT], limit=12, **params)
    small = load(tiny["llama"], num_blocks=3)
    assert_equal_to_brute_force(small, tiny["llama"], [PROMPT], limit=13, **params)


def test_a_refused_prompt_leaves_nothing(llama):
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    with pytest.raises(RequestError, match="prompt has 300 tokens"):
        llama.beam_search([PROMPT, [5] * 300], params)
    with pytest.raises(RequestError, match="token id 99"):
        llama.beam_search([PROMPT, [99]], params)
    assert not llama.has_work
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest; got 'adapter'"):
        llama.beam_search([PROMPT], params, lora_request="adapter")
    with pytest.raises(ConfigError, match="concurrency_limit must be an integer at least 1"):
        llama.beam_search([PROMPT], params, concurrency_limit=0)
    assert llama.beam_search([], params) == []


def poet_of(model, folder):
    """Return a random adapter of a model, and the weights with the adapter."""
    arrays = random_adapter(model.weights, 1, size=2.0)
    own = LoRARequest("poet", 1, str(write_peft(folder / "poet", arrays)))
    return own, merged(model.weights, arrays, 1.0)


def test_beams_with_an_adapter_equal_those_of_the_merged_weights(tiny, tmp_path):
    model, params = tiny["llama"], {"beam_width": 3, "max_tokens": 6}
    own, weights = poet_of(model, tmp_path)
    llm = load(model, enable_lora=True)
    outputs = llm.beam_search(
        [PROMPT, PROMPT], BeamSearchParams(**params), lora_request=[None, own]
    )
    expected = [
        naive.beam_search(model.config, each, PROMPT, params, eos={EOS}, limit=10**9)
        for each in (model.weights, weights)
    ]
    assert expected[0][0] != expected[1][0]
    for output, beams in zip(outputs, expected, strict=True):
        assert_beams(output, beams)
    assert_nothing_is_held(llm)


def test_a_search_whose_adapter_is_removed_is_refused_and_leaves_nothing(tiny, tmp_path):
    own, _ = poet_of(tiny["llama"], tmp_path)
    llm = load(tiny["llama"], enable_lora=True)
    llm.engine.observers.append(lambda stats: llm.engine.adapters.remove("poet"))
    with pytest.raises(RequestError, match="adapter poet was removed"):
        llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=4), lora_request=own)
    assert_nothing_is_held(llm)


def test_an_aborted_beam_fails_the_search_and_leaves_nothing(tiny):
    llm = load(tiny["llama"], max_num_seqs=2)

    def abort_what_waits(stats):
        if stats.num_waiting:  # two of the three beams have ended
            for request in llm.engine.requests:
                llm.abort(request.request_id)

    llm.engine.observers.append(abort_what_waits)
    with pytest.raises(RequestFailedError, match="a beam failed: it was aborted"):
        llm.beam_search([PROMPT], BeamSearchParams(beam_width=3, max_tokens=6))
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_at_any_line_leaves_nothing(tiny, kind):
    llm = load(tiny["llama"], num_blocks=20)
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    strike, error = KINDS[kind]
    rng = random.Random(kind)
    wanted = [beam.tokens for beam in llm.beam_search([PROMPT], params)[0].sequences]

    def search():
        return [beam.tokens for beam in llm.beam_search([PROMPT], params)[0].sequences]

    num_cut = 0
    with handlers():
        for _ in range(30):
            injector = Injector(strike, int(2 ** rng.uniform(3, 13)))
            try:
                assert injector.run(search) == wanted, injector.where
            except error:
                num_cut += 1
            gc.collect(0)
            assert llm.step() == [], injector.where
            assert_nothing_is_held(llm)
    assert num_cut > 10
    assert search() == wanted
    assert not llm.loop.processor.has_requests


def test_a_concurrency_limit_changes_nothing(llama):
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    prompts = [PROMPT, *OTHERS]
    assert llama.beam_search(prompts, params, concurrency_limit=2) == llama.beam_search(
        prompts, params
    )


def test_the_text_has_the_prompt_and_eos_only_on_request():
    llm = LLM("bundled", max_num_seqs=4)
    prompt = "Tell me a story about Mia the fox, the mill and a bell."
    texts = []
    for is_included in (False, True):
        params = BeamSearchParams(
            beam_width=2, max_tokens=5, include_stop_str_in_output=is_included
        )
        [output] = llm.beam_search({"prompt": prompt}, params)
        best = output.sequences[0]
        assert prompt in best.text
        assert len(best.logprobs) == 5
        assert len(best.logprobs[0]) == 4
        entry = best.logprobs[0][best.tokens[-5]]
        assert entry.decoded_token == llm.tokenizer.token_str(best.tokens[-5])
        texts.append(best.text)
    assert texts[0] == texts[1]
    eos = llm.tokenizer.eos_token_id
    llm.engine.eos_token_ids = (eos, best.tokens[-1])
    texts = {}
    for is_included in (False, True):
        params = BeamSearchParams(
            beam_width=2, max_tokens=5, include_stop_str_in_output=is_included, length_penalty=0.0
        )
        [output] = llm.beam_search(prompt, params)
        ended = [beam for beam in output.sequences if beam.finish_reason == "stop"]
        texts[is_included] = ended[0].text
        last = ended[0].tokens[-1]
    assert texts[True] == texts[False] + llm.tokenizer.decode([last], skip_special_tokens=False)
