"""Test `LLM` with the bundled model: the API of vLLM's offline examples."""

import pytest
from audit import check_scheduler

from mie import LLM, SamplingParams
from mie.errors import ConfigError, RequestError, RequestFailedError
from mie.frontend.answer import Answer

PROMPT = "Tell me a story about Mia the fox, the old mill and a silver bell."


@pytest.fixture(scope="module")
def llm():
    return LLM("bundled", max_num_seqs=8)


@pytest.fixture(autouse=True)
def nothing_leaks(llm):
    yield
    llm.step()  # takes the final outputs of requests that were aborted
    assert not llm.has_work
    assert llm.engine.scheduler.manager.num_used == 0
    assert not llm.loop.processor.has_requests
    check_scheduler(llm.engine.scheduler)


def generate(llm, prompt=PROMPT, **params):
    [output] = llm.generate(prompt, SamplingParams(**{"temperature": 0, **params}), use_tqdm=False)
    return output


def test_vllms_offline_example_runs(llm):
    prompts = ["Hello, my name is", "The president of the United States is", "The capital of"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.finished
        assert isinstance(output.outputs[0].text, str)
        assert 1 <= len(output.outputs[0].token_ids) <= 16
        assert output.outputs[0].finish_reason in ("stop", "length")


def test_a_text_and_its_token_ids_are_the_same_prompt(llm):
    token_ids = llm.tokenizer.encode(PROMPT)
    by_text = generate(llm)
    assert by_text.prompt_token_ids == token_ids
    for prompt in (token_ids, {"prompt_token_ids": token_ids}, {"prompt": PROMPT}, [PROMPT]):
        assert generate(llm, prompt).outputs[0].token_ids == by_text.outputs[0].token_ids


def test_params_can_be_given_for_each_prompt(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 7)]
    outputs = llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 7]
    with pytest.raises(ConfigError, match="1 prompts need 1 sampling_params; got 2"):
        llm.generate([PROMPT], params)


def test_a_stop_string_ends_the_text_across_tokens(llm):
    whole = generate(llm, max_tokens=60, ignore_eos=True).outputs[0].text
    stop = whole[30:41]
    stopped = generate(llm, max_tokens=60, stop=[stop]).outputs[0]
    assert stopped.text == whole[: whole.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    included = generate(llm, max_tokens=60, stop=stop, include_stop_str_in_output=True).outputs[0]
    assert included.text == stopped.text + stop


def test_a_stop_token_is_not_part_of_the_text(llm):
    whole = generate(llm, max_tokens=9, ignore_eos=True).outputs[0].token_ids
    count = whole.index(whole[4])
    stopped = generate(llm, max_tokens=9, stop_token_ids=[whole[4]]).outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", whole[4])
    assert stopped.text == generate(llm, max_tokens=count, ignore_eos=True).outputs[0].text


def test_min_tokens_holds_back_every_ending(llm):
    whole = generate(llm, max_tokens=60, ignore_eos=True).outputs[0]
    stopped = generate(llm, max_tokens=60, stop=[whole.text[:4]], min_tokens=5).outputs[0]
    assert len(stopped.token_ids) >= 5
    banned = generate(llm, max_tokens=9, stop_token_ids=[whole.token_ids[0]], min_tokens=3)
    assert banned.outputs[0].token_ids[0] != whole.token_ids[0]


def test_logprobs(llm):
    output = generate(llm, max_tokens=5, logprobs=3, prompt_logprobs=2)
    [choice] = output.outputs
    assert len(choice.logprobs) == len(choice.token_ids) == 5
    for token_id, row in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(row)) == token_id
        assert len(row) == 3, "the chosen token is one of the three: greedy"
        assert [entry.rank for entry in row.values()] == [1, 2, 3]
        assert row[token_id].decoded_token == llm.tokenizer.token_str(token_id)
    assert choice.cumulative_logprob == pytest.approx(
        sum(row[t].logprob for t, row in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token_id, row in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        ranks = {entry.rank for entry in row.values()}
        assert token_id in row
        assert {1, 2} <= ranks
        assert len(row) == len(ranks) in (2, 3)
    without = generate(llm, max_tokens=5)
    assert without.outputs[0].logprobs is without.prompt_logprobs is None


def test_a_salt_separates_prompts_and_a_reset_clears_the_cache(llm):
    def num_cached(**salt):
        prompt = {"prompt": "A secret that only one tenant has told " * 3, **salt}
        return generate(llm, prompt).num_cached_tokens

    llm.reset_prefix_cache()
    assert num_cached(cache_salt="a") == 0
    assert num_cached(cache_salt="b") == 0
    assert num_cached() == 0
    assert num_cached(cache_salt="a") > 16
    assert llm.reset_prefix_cache()
    assert num_cached(cache_salt="a") == 0
    for wrong in ("", 3):
        with pytest.raises(RequestError, match="cache_salt must be a non-empty string"):
            num_cached(cache_salt=wrong)


def test_priorities_need_their_policy_and_one_for_each_prompt(tiny):
    llm = LLM(tiny["llama"].directory, skip_tokenizer_init=True, scheduling_policy="priority")
    params = SamplingParams(max_tokens=2)
    outputs = llm.generate([[1], [2], [3]], params, use_tqdm=False, priority=[2, 0, 1])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 2, 2]
    with pytest.raises(ConfigError, match="3 prompts need 3 priorities; got 1"):
        llm.generate([[1], [2], [3]], params, use_tqdm=False, priority=[1])
    with pytest.raises(RequestError, match=r"priority must be an integer; got 1\.5"):
        llm.add_request([1], params, priority=1.5)


def test_metrics_account_for_the_time(llm):
    metrics = generate(llm, "Once upon a time there was").metrics
    assert metrics.queue_time >= 0
    assert metrics.prefill_time > 0
    assert metrics.decode_time > 0
    total = metrics.queue_time + metrics.prefill_time + metrics.decode_time
    assert total == pytest.approx(metrics.total_time)
    assert metrics.time_to_first_token == pytest.approx(metrics.queue_time + metrics.prefill_time)
    assert set(metrics.as_dict()) >= {"num_preemptions", "num_recomputed_tokens", "num_swaps"}


def test_chat_writes_the_conversation_with_the_models_template(llm):
    messages = [{"role": "user", "content": PROMPT}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert output.prompt == llm.apply_chat_template(messages)
    assert PROMPT in output.prompt
    assert output.prompt_token_ids.count(llm.tokenizer.bos_token_id) == 1
    assert output.outputs[0].text
    plain = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    [output] = llm.chat(messages, llm.get_default_sampling_params(), chat_template=plain)
    assert output.prompt == llm.tokenizer.special_tokens["bos_token"] + PROMPT
    several = llm.chat([messages, messages], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(several) == 2


CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "Tell me"}, "a story"]},
    {"role": "assistant", "content": "Once upon a"},
]
SHOW = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ tools }}{{ x }}{{ 'G' if g }}"


def test_chat_takes_vllms_parameters(llm):
    one = SamplingParams(temperature=0, max_tokens=1)

    def prompt(**options):
        return llm.chat(CHAT, one, use_tqdm=False, **options)[0].prompt

    assert prompt().endswith("<|user|>Tell me\na story<|assistant|>Once upon a<|eos|><|assistant|>")
    assert prompt(add_generation_prompt=False).endswith("Once upon a<|eos|>")
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt(**continued).endswith("<|assistant|>Once upon a")
    assert llm.apply_chat_template(CHAT, **continued) == prompt(**continued)
    assert llm.chat_prompt(CHAT, **continued)["prompt"] == prompt(**continued)
    own = {"chat_template": SHOW, "chat_template_kwargs": {"x": "X"}}
    own["tools"] = [{"function": {"name": "f"}}]
    own["chat_template"] += "{# <tool_call> #}"
    assert prompt(**own) == "<Tell me\na story><Once upon a>[{'function': {'name': 'f'}}]X"
    assert prompt(**own, chat_template_content_format="openai").startswith("<[{'type': 'text'")
    assert prompt(lora_request=None, mm_processor_kwargs=None) == prompt()
    assert llm.chat([], one) == []


@pytest.mark.parametrize("method", ["chat", "apply_chat_template", "chat_prompt"])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"chat_templat": "x"}, r"no parameter 'chat_templat'; did you mean 'chat_template'"),
        ({"enable_thinking": True}, "variables of the template go into chat_template_kwargs"),
        ({"continue_final_message": True}, "exclude each other"),
        ({"chat_template_content_format": "xml"}, "must be one of 'auto', 'string', 'openai'"),
        ({"chat_template_kwargs": {"tools": 1}}, "tools is a separate parameter"),
        ({"chat_template_kwargs": {"x": object()}}, "must be JSON values"),
        ({"chat_template": 5}, "the chat template must be text, got int"),
    ],
)
def test_chat_refuses_unknown_parameters(llm, method, option, message):
    with pytest.raises((ConfigError, RequestError), match=message):
        getattr(llm, method)(CHAT, **option)


def test_only_methods_that_generate_take_adapters(llm):
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest; got 'x'"):
        llm.chat(CHAT, lora_request="x")
    message = "lora_request is not supported: only methods that generate take adapters .*; got 'x'"
    for method in (llm.apply_chat_template, llm.chat_prompt):
        with pytest.raises(ConfigError, match=message):
            method(CHAT, lora_request="x")


def test_one_bad_prompt_stops_the_call_before_it_runs(llm):
    with pytest.raises(RequestError, match="the context holds"):
        llm.generate([PROMPT, "a " * 3000], use_tqdm=False)


def test_detokenize_false_gives_no_text(llm):
    output = generate(llm, "Once upon", detokenize=False, logprobs=2, prompt_logprobs=1)
    choice = output.outputs[0]
    assert choice.text == ""
    rows = [*choice.logprobs, *output.prompt_logprobs[1:]]
    assert {entry.decoded_token for row in rows for entry in row.values()} == {None}


def test_a_model_without_a_tokenizer_gives_ids_and_no_text(tiny):
    llm = LLM(tiny["llama"].directory, skip_tokenizer_init=True)
    choice = generate(llm, [1, 2, 3], ignore_eos=True, logprobs=1).outputs[0]
    assert (len(choice.token_ids), choice.text) == (16, "")
    assert choice.logprobs[0][choice.token_ids[0]].decoded_token is None
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([1], SamplingParams(stop="x"), use_tqdm=False)


def test_no_whole_answer_is_taken_before_an_error_at_its_end(llm, monkeypatch):
    taken, fail = [], Answer.fail

    def count_calls(self):
        raise ZeroDivisionError("injected")

    def take_and_fail(self, error):
        taken.append(self.take())  # as the thread of a stream may, between the two
        fail(self, error)

    monkeypatch.setattr(Answer, "_count_calls", count_calls)
    monkeypatch.setattr(Answer, "fail", take_and_fail)
    with pytest.raises(RequestFailedError, match="ZeroDivisionError: injected"):
        llm.generate(["Once"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert taken == [None]
