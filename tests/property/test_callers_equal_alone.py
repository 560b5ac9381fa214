"""Check that each request of any mix of callers gives the same as alone.

Threads call `generate`, `stream`, `add_request` with `step`, and `abort`. asyncio tasks generate,
stop listening, and are cancelled. The machine decides how the threads alternate, but the results
are fixed. At the end every block is free and no caller waits.
"""

import asyncio
import gc
import os
import random
import threading

import pytest
from audit import check_idle, loop_of
from deadlines import join
from scripted_llm import SETTINGS, expected, new_llm

from mie import AsyncLLM, SamplingParams
from mie.config.params.sampling import RequestOutputKind

NUM_RUNS = 4000 if os.environ.get("MIE_HYPOTHESIS") == "far" else 200


def random_request(rng):
    prompt = [rng.randrange(4, 8) for _ in range(rng.randrange(1, 12))]
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2]),
        max_tokens=rng.randrange(1, 9),
        ignore_eos=rng.random() < 0.5,
        output_kind=rng.choice(list(RequestOutputKind)),
    )
    return prompt, params, [expected(prompt, params, i) for i in range(params.n)]


class Tokens:
    """A request's tokens, joined from its outputs."""

    def __init__(self, params):
        self.params = params
        self.tokens = [[] for _ in range(params.n)]
        self.reasons = [None] * params.n
        self.is_finished = False

    def add(self, output):
        assert not self.is_finished, "an output after the final one"
        self.is_finished = output.finished
        for choice in output.outputs:
            if self.params.output_kind is RequestOutputKind.DELTA:
                self.tokens[choice.index] += choice.token_ids
            else:
                assert len(choice.token_ids) >= len(self.tokens[choice.index])
                self.tokens[choice.index] = choice.token_ids
            self.reasons[choice.index] = choice.finish_reason

    def check(self, wanted):
        """Assert that the tokens equal the expected ones, or their beginning after an early end."""
        is_whole = self.is_finished and "abort" not in self.reasons
        for got, each in zip(self.tokens, wanted, strict=True):
            assert got == each if is_whole else got == each[: len(got)]


class Caller:
    """The calls of one thread."""

    def __init__(self, llm, seed):
        self.llm = llm
        self.rng = random.Random(seed)
        self.seed = seed

    def run(self):
        for number in range(3):
            self.rng.choice([self.generate, self.stream, self.stop_early, self.step])(number)

    def generate(self, number):
        requests = [random_request(self.rng) for _ in range(self.rng.randrange(1, 4))]
        prompts, params, wanted = zip(*requests, strict=True)
        outputs = self.llm.generate(list(prompts), list(params), use_tqdm=False)
        assert [[choice.token_ids for choice in o.outputs] for o in outputs] == list(wanted)

    def stream(self, number, most=1000):
        prompt, params, wanted = random_request(self.rng)
        tokens = Tokens(params)
        for count, output in enumerate(self.llm.stream(prompt, params)):
            tokens.add(output)
            if count == most:
                break
        assert tokens.is_finished or most < 1000
        tokens.check(wanted)

    def stop_early(self, number):
        self.stream(number, most=self.rng.randrange(3))

    def step(self, number):
        """Call `add_request` and `step`. The outputs reach any thread that steps."""
        prompt, params, wanted = random_request(self.rng)
        request_id = f"{self.seed} {number}"
        with self.llm.test_lock:
            self.llm.test_requests[request_id] = (Tokens(params), wanted)
        self.llm.add_request(prompt, params, request_id)
        if self.rng.random() < 0.3:
            self.llm.abort(request_id)
        for _ in range(self.rng.randrange(5)):
            take_steps(self.llm)


def take_steps(llm):
    with llm.test_lock:  # record the outputs of one request in order
        for output in llm.step():
            llm.test_requests[output.request_id][0].add(output)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_threads(tiny, settings):
    llm = new_llm(tiny["llama"].directory, settings)
    llm.test_lock = threading.Lock()
    for run in range(NUM_RUNS // len(SETTINGS) // 2):
        llm.test_requests = {}
        failures = []

        def guarded(caller, failures=failures):
            try:
                caller.run()
            except BaseException as error:
                failures.append(error)

        callers = [Caller(llm, f"{run} {i}") for i in range(4)]
        threads = [threading.Thread(target=guarded, args=(caller,)) for caller in callers]
        for thread in threads:
            thread.start()
        join(*threads)
        if failures:
            raise failures[0]
        while llm.has_work:
            take_steps(llm)
        for tokens, wanted in llm.test_requests.values():
            assert tokens.is_finished
            tokens.check(wanted)
        gc.collect(0)
        check_idle(llm)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tasks(tiny, settings, monkeypatch):
    monkeypatch.setattr(
        "mie.frontend.async_llm.LLM", lambda directory: new_llm(directory, settings)
    )
    llm = AsyncLLM(tiny["llama"].directory)
    try:
        for run in range(NUM_RUNS // len(SETTINGS) // 2):
            asyncio.run(run_tasks(llm, random.Random(f"tasks {run}")))
            gc.collect(0)
            check_idle(llm)
    finally:
        llm.shutdown()


async def run_tasks(llm, rng):
    names = [f"request {i}" for i in range(rng.randrange(2, 9))]
    tasks = [
        asyncio.create_task(one_task(llm, random.Random(rng.random()), name)) for name in names
    ]
    for task, name in zip(tasks, names, strict=True):
        fate = rng.random()
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if fate < 0.2:
            task.cancel()
        elif fate < 0.4:
            await llm.abort(name)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        assert result is None or isinstance(result, asyncio.CancelledError), result
    gc.collect(0)
    await loop_of(llm).call_async(lambda: None)
    while loop_of(llm).inbox:  # the engine's thread has yet to drop that call
        await asyncio.sleep(0)


async def one_task(llm, rng, name):
    prompt, params, wanted = random_request(rng)
    tokens = Tokens(params)
    most = rng.choice([1000, 1000, 1000, 1])
    outputs = llm.generate(prompt, params, name)
    count = 0
    async for output in outputs:
        tokens.add(output)
        count += 1
        if count == most:
            await outputs.aclose()
            break
    assert tokens.is_finished or count == most
    tokens.check(wanted)
