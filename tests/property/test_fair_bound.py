"""Check the bound of the fair policy: a client's only request gets a token within K steps.

The other clients are hostile: they send long prompts, many choices and long answers, as many as
they like, at any time. docs/scheduling.md states K.
"""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from scripted_runner import scripted_engine

from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams

CONTEXT = 64


def bound(config, num_clients, num_prompt, num_blocks):
    """Return K."""
    longest = min(CONTEXT, num_blocks * config.block_size + 1)
    part = config.max_num_batched_tokens // num_clients
    own, others = part, part - config.max_num_seqs + 1
    if config.max_prefill_chunk:
        own, others = min(own, config.max_prefill_chunk), min(others, config.max_prefill_chunk)
    if not config.enable_chunked_prefill:
        own = others = longest
    turn = math.ceil(longest / others) + config.fair_turn + 2
    return num_clients * turn + math.ceil(num_prompt / own)


@st.composite
def engines(draw):
    num_seqs, block_size = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4, 8]))
    num_others = draw(st.sampled_from([1, 1, 2, 3]))
    is_chunked = draw(st.sampled_from([True, True, False]))
    least = (num_others + 1) * (num_seqs + 1) if is_chunked else CONTEXT
    num_blocks = -(-CONTEXT // block_size) + draw(st.sampled_from([0, 0, 1, 5, 100]))
    swaps = draw(st.booleans())
    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=least + draw(st.integers(0, 30)),
        max_prefill_chunk=draw(st.sampled_from([None, 3])) if is_chunked else None,
        enable_chunked_prefill=is_chunked,
        enable_prefix_caching=draw(st.booleans()),
        scheduling_policy="fair",
        fair_turn=draw(st.sampled_from([1, 4, 8])),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        preemption_mode="swap" if swaps else "recompute",
        async_scheduling=draw(st.booleans()),
        max_forced_run=draw(st.sampled_from([0, 8])),
    )
    return config, num_others, draw(st.sampled_from([4, 60])) if swaps else 0


hostile = st.lists(
    st.tuples(
        st.integers(0, 2),  # which client
        st.integers(0, 30),  # when
        st.sampled_from([1, 1, 2, 6]),  # n
        st.sampled_from([1, 8, 30, CONTEXT - 1]),  # prompt
        st.sampled_from([1, 5, None, None]),  # max_tokens
    ),
    min_size=1,
    max_size=25,
)


class Stream:
    """Sends the hostile requests, over and over."""

    def __init__(self, engine, requests, num_others):
        self.engine, self.requests, self.num_others = engine, requests, num_others
        self.num_sent = 0

    def send(self, step):
        for client, when, n, num_prompt, max_tokens in self.requests:
            if step % 31 == when and len(self.engine.requests) < 40:
                self.num_sent += 1
                prompt = [4 + (self.num_sent * i) % 40 for i in range(num_prompt)]
                params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
                name = f"other {client % self.num_others}"
                self.engine.add_request(prompt, params, client=name)


def steps_to_first_token(config, num_others, num_host_blocks, requests, arrival, num_prompt):
    """Return the number of steps until a new client's only request has its first token."""
    engine = scripted_engine(config, config.num_blocks, CONTEXT, num_host_blocks)
    stream = Stream(engine, requests, num_others)
    for step in range(arrival):
        stream.send(step)
        if engine.has_work:
            engine.step()
    only = engine.add_request([5] * num_prompt, SamplingParams(max_tokens=1), client="only")
    for steps in range(1, 2000):
        stream.send(arrival + steps)
        engine.step()
        if only.is_finished:
            return steps
    return math.inf


@given(engines(), hostile, st.integers(0, 40), st.integers(1, CONTEXT - 1))
def test_the_first_token_of_an_only_request_comes_within_k_steps(
    drawn, requests, arrival, num_prompt
):
    config, num_others, num_host_blocks = drawn
    steps = steps_to_first_token(config, num_others, num_host_blocks, requests, arrival, num_prompt)
    assert steps <= bound(config, num_others + 1, num_prompt, config.num_blocks)


@given(engines(), hostile, st.integers(0, 40), st.integers(1, CONTEXT - 1))
def test_it_comes_sooner_if_only_seats_are_short(drawn, requests, arrival, num_prompt):
    """With blocks for all, a client waits for one turn, and then its prompt gets its part."""
    config, num_others, num_host_blocks = drawn
    num_others = min(num_others, max(1, config.max_num_seqs - 1))
    num_blocks = 2 * config.max_num_seqs * -(-CONTEXT // config.block_size)
    config = replace(config, num_blocks=num_blocks)
    if config.max_num_seqs > num_others and config.enable_chunked_prefill:
        steps = steps_to_first_token(
            config, num_others, num_host_blocks, requests, arrival, num_prompt
        )
        part = config.max_num_batched_tokens // (num_others + 1)
        own = min(part, config.max_prefill_chunk or part)
        assert steps <= config.fair_turn + num_others + 2 + math.ceil(num_prompt / own)


def test_a_short_request_beside_two_long_ones_on_two_seats():
    config = EngineConfig(max_num_seqs=2, block_size=16, scheduling_policy="fair")
    engine = scripted_engine(config, 200, 1000)
    long = SamplingParams(max_tokens=900, ignore_eos=True)
    for _ in range(2):
        engine.add_request([5] * 20, long, client="a")
    for _ in range(40):
        engine.step()
    short = engine.add_request([6] * 8, SamplingParams(max_tokens=4, ignore_eos=True), client="b")
    num_steps = 0
    while not short.is_finished:
        engine.step()
        num_steps += 1
    assert num_steps <= 4
    while engine.has_work:
        engine.step()
