"""Check that the engine gives the oracle's tokens for any request under any schedule.

The engine runs in float64, its caches on device and host are filled with NaN, and its invariants
are checked after every step.
"""

from collections import Counter
from itertools import chain

import naive
import numpy as np
import pytest
from audit import caches_of, check_memory, check_scheduler, states_of
from compiled import needs_numba
from hypothesis import given, settings
from hypothesis import strategies as st
from rare import check_until_seen
from tiny_models import TINY

from mie import EngineConfig, SamplingParams, StructuredOutputsParams
from mie.config.engine import POLICIES
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.model.layout import grouped

VOCAB, EOS = 40, 3

seen: Counter[str] = Counter()

token_ids = st.integers(0, VOCAB - 1)

OFTEN = (
    *("preempted by recompute", "prefix hits", "copies, prefix", "copies, fork", "fork"),
    *("wait", "evict", "aborts", "launched ahead", "forced", "pass"),
)
# The drawn examples depend on Python's version, and how often these happen depends on it most.
LESS_OFTEN = (
    *("preempted by recompute: host pool full", "constrained", "preempted by swap"),
    *("resumed by swap", "constrained by two choices"),
    *("constrained and preempted", "failed by the constraint", "share_window", "evict_window"),
)


class Rule:
    """The constraint of `naive.forbidden`, in a form that an engine can follow."""

    def __init__(self, rule):
        self._rule, self._output = rule, []

    def _allowed(self):
        return {*range(VOCAB)} - {*naive.forbidden(self._rule, self._output, [EOS])}

    def determined(self):
        allowed = self._allowed()
        return min(allowed) if len(allowed) == 1 else None

    def mask(self):
        allowed = np.zeros(64, np.uint8)
        allowed[[*self._allowed()]] = 1
        return np.packbits(allowed, bitorder="little").tobytes()

    def allows(self, token_id):
        return token_id in self._allowed()

    def accept(self, token_id):
        assert token_id not in naive.forbidden(self._rule, self._output, [EOS])
        self._output.append(token_id)

    def validate(self, token_ids):
        assert not token_ids, "no tokens are forced here"
        return 0


class Rules:
    """Makes a `Rule` of the numbers in a regex, which nothing else reads."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)

    def start(self, params):
        return Rule([int(number) for number in params.regex.split()])


@st.composite
def prompts(draw):
    """Draw prompts that often begin alike."""
    shared = draw(st.lists(token_ids, min_size=6, max_size=12))
    own = st.lists(token_ids, min_size=1, max_size=8)
    return [
        shared[: draw(st.integers(0, len(shared)))] + draw(own)
        for _ in range(draw(st.integers(2, 6)))
    ]


@st.composite
def sampling(draw):
    """Draw keyword arguments of SamplingParams, which the oracle reads too."""
    params = {
        "n": draw(st.sampled_from([1, 1, 1, 2, 3, 5])),
        "max_tokens": draw(st.sampled_from([12, 10, 8, 6, 4, 2, 1])),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
    }
    optional = {
        "seed": st.integers(-5, 5),
        "top_k": st.integers(1, 10),
        "top_p": st.floats(0.1, 0.99),
        "min_p": st.floats(0.01, 0.5),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(token_ids, st.floats(-5.0, 5.0), min_size=1, max_size=3),
        "allowed_token_ids": st.lists(token_ids, min_size=3, max_size=20, unique=True),
        "stop_token_ids": st.lists(token_ids, max_size=3),
        "ignore_eos": st.booleans(),
        "trace_decode_token_ids": st.lists(token_ids, min_size=1, max_size=4),
        "prompt_logprobs": st.just(0),
        "bad_words_token_ids": st.lists(
            st.lists(token_ids, min_size=1, max_size=2), min_size=1, max_size=2
        ),
        "skip_reading_prefix_cache": st.sampled_from([True, None]),
    }
    for name in draw(st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True)):
        params[name] = draw(optional[name])
    if "trace_decode_token_ids" not in params and draw(st.booleans()):
        length, share = st.sampled_from([12, 10, 8, 12, 5, 2]), st.sampled_from([4, 2, 0])
        params["rule"] = [draw(st.integers(2, 4)), draw(length), draw(share)]
    if "allowed_token_ids" not in params:
        params["min_tokens"] = draw(st.integers(0, params["max_tokens"]))
    return params


@st.composite
def engines(draw, longest):
    """Draw keyword arguments of EngineConfig and the host pool's size in blocks.

    Prompts have at most ``longest`` tokens.
    """
    max_model_len = draw(st.sampled_from([24, 40]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    is_chunked = draw(st.sampled_from([True, True, True, False]))
    caching = draw(st.sampled_from([True, True, True, False]))
    policy = draw(st.sampled_from(POLICIES))
    swaps, is_static = draw(st.booleans()), draw(st.integers(0, 4)) == 4
    budgets = st.sampled_from([1, 2, 3, 5, 8, 32])
    config = {
        "block_size": block_size,
        # From "one request barely fits" to "there is plenty".
        "num_blocks": -(-longest // block_size) + draw(st.integers(0, 6)),
        "max_num_seqs": draw(st.sampled_from([6, 5, 4, 6, 5, 4, 3, 2, 1])),
        "max_num_batched_tokens": draw(budgets) if is_chunked else max_model_len,
        "enable_chunked_prefill": is_chunked,
        "max_prefill_chunk": draw(st.sampled_from([None, 1, 3])) if is_chunked else None,
        "max_model_len": max_model_len,
        "enable_prefix_caching": caching,
        "partial_block_sharing": draw(st.booleans()),
        "max_cached_blocks": draw(st.sampled_from([None, None, 0, 2])) if caching else None,
        "scheduling_policy": policy,
        "sjf_ageing": draw(st.sampled_from([None, 10])) if policy == "sjf" else None,
        "fair_turn": draw(st.sampled_from([1, 3])) if policy == "fair" else None,
        "batching": "static" if is_static else "continuous",
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.01, 0.3])),
        "preemption_mode": "swap" if swaps else "recompute",
        "admit_after_preemption": not is_static and draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "max_forced_run": draw(st.sampled_from([32, 32, 2, 1, 0])),
    }
    return config, draw(st.sampled_from([12, 3, 2, 1, 1])) if swaps else 0


@st.composite
def scenarios(draw):
    prompt_list = draw(prompts())
    config, num_host_blocks = draw(engines(max(len(prompt) for prompt in prompt_list)))
    labels = {"cache_salt": st.sampled_from([None, None, None, "tenant"])}
    if config["scheduling_policy"] == "priority":
        labels["priority"] = st.integers(-2, 2)
    if config["scheduling_policy"] == "fair":
        labels["client"] = st.sampled_from([None, "a", "b"])
    # Log-probabilities prevent a step from being launched ahead.
    logprobs = st.none() if config["async_scheduling"] else st.sampled_from([0, 0, None])
    # (prompt, its sampling, the step of its arrival, its labels)
    requests = [
        (
            prompt,
            draw(sampling()) | {"logprobs": draw(logprobs)},
            draw(st.integers(0, 6)),
            draw(st.fixed_dictionaries(labels)),
        )
        for prompt in prompt_list
    ]
    indices = st.integers(0, len(requests) - 1)
    aborts = st.dictionaries(indices, st.integers(1, 15), max_size=3)
    return {
        "model": draw(st.sampled_from(sorted(TINY))),
        "requests": requests,
        "aborts": draw(aborts) if draw(st.booleans()) else {},
        "config": config,
        "num_host_blocks": num_host_blocks,
    }


def new_engine(model, config, num_host_blocks, backend, drafter=None):
    """Return an engine whose caches hold NaN until something is written.

    NumPy computes in float64, so that nothing but a mistake changes a token. The other backends
    compute in float32. The caches of the emulated GPU hold zeros, and its bits depend on no batch.
    """
    if num_host_blocks:
        numbers = model.config["num_key_value_heads"] * model.config["head_dim"]
        bytes_per_token = 2 * model.config["num_hidden_layers"] * numbers * 8
        swap_space = num_host_blocks * config["block_size"] * bytes_per_token
        config = {**config, "swap_space": swap_space}
    # A token of a model with windows takes a block of each group of layers.
    config = {**config, "num_blocks": config["num_blocks"] * grouped(model.parsed).num_groups}
    is_emulated = backend == "cupy-emulated"
    settings = EngineConfig(**config, batch_invariant=is_emulated)
    dtype = "float64" if backend == "numpy" else "float32"
    engine = load_engine(
        model.directory,
        LoadSettings(engine=settings, backend=backend, dtype=dtype),
        constraints=Rules(),
        drafter=drafter,
    )
    if is_emulated:
        return engine
    for cache in caches_of(engine):
        (cache if backend == "numpy" else cache.elements).fill(np.nan)
    if (states := states_of(engine)) is not None:
        states.columns.fill(np.nan)
        states.states.fill(np.nan)
    return engine


def as_sampling(params):
    """Return the keyword arguments of SamplingParams, for those that the oracle reads."""
    params = dict(params)
    if rule := params.pop("rule", None):
        regex = " ".join(map(str, rule))
        params["structured_outputs"] = StructuredOutputsParams(regex=regex)
    return params


class Run:
    """The results of a scenario."""

    def __init__(self, engine, scenario):
        self.engine, self.config, self.scenario = engine, scenario["config"], scenario
        # {(request, choice): …}
        self.tokens, self.logprobs, self.reasons = {}, {}, {}
        # {request: …}
        self.requests, self.numbers, self.aborted, self.failed = {}, {}, set(), set()
        requests, aborts = scenario["requests"], scenario["aborts"]
        waiting, step = dict(enumerate(requests)), 0
        while waiting or engine.has_work:
            for index in [i for i, request in waiting.items() if request[2] <= step]:
                prompt, params, _, labels = waiting.pop(index)
                params = SamplingParams(**as_sampling(params))
                self.requests[index] = engine.add_request(prompt, params, str(index), **labels)
                self.numbers[index] = len(self.numbers)
            for index in [i for i in self.numbers if aborts.get(i) == step]:
                engine.abort(str(index))
                self.aborted.add(index)
            self.take_in(engine.step())
            seen["launched ahead"] += engine.runner.is_ahead
            check_scheduler(engine.scheduler)
            step += 1
            assert step < 2000, "the engine has work and does nothing"
        assert engine.scheduler.manager.num_used == 0, "a block was not freed"
        check_memory(engine.scheduler.manager, [])
        self.scored = {
            index: [row.logprobs[0] for row in request.prompt_logprobs]
            for index, request in self.requests.items()
            if request.prompt_logprobs
        }
        self.count()

    def take_in(self, output):
        stats = output.stats
        self.failed.update(map(int, output.failed))
        used = stats.num_prefill_tokens + stats.num_decode_tokens
        assert used <= self.config["max_num_batched_tokens"]
        assert stats.num_running <= self.config["max_num_seqs"]
        for index in map(int, output.request_ids):
            request = self.requests[index]
            for seq in request.sequences:
                if seq.num_generated:
                    self.take_in_choice((index, seq.index), seq, request.metrics.num_cached_tokens)

    def take_in_choice(self, key, seq, num_cached_tokens):
        tokens = seq.output_ids[: seq.num_final]
        if key in self.reasons:
            assert tokens == self.tokens[key], "goes on after its end"
            return
        before = self.tokens.get(key, [])
        assert tokens[: len(before)] == before, "an earlier token changed"
        self.tokens[key] = tokens
        self.logprobs[key] = [row.logprobs[0] for row in seq.logprobs]
        if seq.finish_reason is not None:
            self.reasons[key] = seq.finish_reason
            seen["prefix hits"] += num_cached_tokens > 0
            params = self.scenario["requests"][key[0]][1]
            assert not (params.get("skip_reading_prefix_cache") and num_cached_tokens)

    def count(self):
        """Count how often the cases that make scheduling hard occurred."""
        segments = self.engine.log.segments()
        for kind, *fields in chain.from_iterable(chain.from_iterable(s.steps for s in segments)):
            if kind == "preempt":
                requests, numbers = self.scenario["requests"], self.numbers
                [index] = [i for i, number in numbers.items() if number == fields[0][0]]
                seen["constrained and preempted"] += "rule" in requests[index][1]
                seen[f"preempted by {fields[2]}"] += 1
            elif kind == "force":
                seen["forced"] += 1
            elif kind == "resume":
                seen[f"resumed by {fields[4]}"] += 1
            elif kind == "copy":
                seen[f"copies, {fields[3]}"] += 1
            elif kind in ("fork", "wait", "evict", "pass", "share_window", "evict_window"):
                seen[kind] += 1
        seen["aborts"] += len(self.aborted)
        stats = self.engine.scheduler.manager.stats
        seen["snapshots"] += stats.num_snapshots
        seen["snapshots evicted"] += stats.num_snapshot_evictions


def check_scenario(tiny, backend, scenario):
    model, config = tiny[scenario["model"]], scenario["config"]
    got = Run(new_engine(model, config, scenario["num_host_blocks"], backend), scenario)
    atol = 1e-9 if backend == "numpy" else 1e-4
    limit = min(config["max_model_len"], got.engine.scheduler.manager.capacity + 1)
    seen["scenarios"] += 1
    for index, (prompt, params, _, _) in enumerate(scenario["requests"]):
        was_aborted = index in got.aborted or index in got.failed
        ends = set()
        # Without its own seed, a request draws from the engine's (0), by order of arrival.
        stream = 0 if "seed" in params else got.numbers[index] + 1
        for choice in range(params["n"]):
            expected, reason, expected_logprobs = naive.generate(
                model.config,
                model.weights,
                prompt,
                params,
                choice=choice,
                stream=stream,
                eos=[EOS],
                limit=limit,
            )
            ends.add(reason)
            tokens = got.tokens.get((index, choice), [])
            assert tokens == expected[: len(tokens)] if was_aborted else tokens == expected
            assert was_aborted or got.reasons[index, choice] == reason
            seen["constrained"] += "rule" in params and reason == "stop"
            if params["logprobs"] is not None:
                np.testing.assert_allclose(
                    got.logprobs.get((index, choice), []),
                    expected_logprobs[: len(tokens)],
                    atol=atol,
                )
        seen["constrained by two choices"] += "rule" in params and params["n"] > 1
        seen["failed by the constraint"] += index in got.failed
        # One choice without a token fails the request, unless it was aborted before.
        assert (index in got.failed) <= ("error" in ends)
        assert was_aborted or "error" not in ends
        if "prompt_logprobs" in params:
            check_prompt_logprobs(model, prompt, got.scored.get(index, []), was_aborted, atol)


def check_prompt_logprobs(model, prompt, got, was_aborted, atol):
    rows = naive.logits(model.config, model.weights, prompt)
    expected = [
        row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
        for row, token in zip(rows[:-1], prompt[1:], strict=True)
    ]
    assert was_aborted or len(got) == len(expected)
    np.testing.assert_allclose(got, expected[: len(got)], atol=atol)


@pytest.mark.parametrize(
    ("backend", "count"), [("numpy", 40), pytest.param("jit", 12, marks=needs_numba)]
)
def test_engine_equals_naive(tiny, backend, count):
    """The scheduler is the same with each backend, so the second one runs fewer scenarios."""

    @given(scenario=scenarios())
    @settings(max_examples=settings().max_examples * count // 40)
    def check_scenarios(scenario):
        check_scenario(tiny, backend, scenario)

    # The scenarios would prove little if these cases were rare.
    cases = {**dict.fromkeys(OFTEN, 4), **dict.fromkeys(LESS_OFTEN, 1)}
    wanted = {"scenarios": count, **(cases if backend == "numpy" else {})}
    check_until_seen(lambda check: check(), check_scenarios, seen, wanted)
