"""Check that many concurrent requests, 30 % of them cancelled, leave nothing behind."""

import asyncio
import gc
import random
import sys

import pytest
from audit import check_idle, loop_of
from scripted_llm import expected, new_llm

from mie import AsyncLLM, SamplingParams

WARM_UP = 1_000
AT_ONCE = 64


@pytest.fixture
def llm(tiny, monkeypatch):
    monkeypatch.setattr(
        "mie.frontend.async_llm.LLM", lambda directory: new_llm(directory, {"event_log_steps": 0})
    )
    llm = AsyncLLM(tiny["llama"].directory)
    yield llm
    llm.shutdown()


async def request(llm, rng, name):
    prompt = [rng.randrange(4, 8) for _ in range(rng.randrange(1, 12))]
    params = SamplingParams(max_tokens=rng.randrange(1, 9), ignore_eos=True)
    async for output in llm.generate(prompt, params, name):
        tokens = output.outputs[0].token_ids
    assert tokens == expected(prompt, params)
    return 1


async def soak(llm, rng, numbers):
    """Run requests, `AT_ONCE` at a time, and return how many were answered."""
    answered, running = 0, set()
    for number in numbers:
        task = asyncio.create_task(request(llm, random.Random(number), f"request {number}"))
        running.add(task)
        if rng.random() < 0.3:
            later(task, rng.randrange(1, 9))
        while len(running) >= AT_ONCE:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            answered += sum(not each.cancelled() and each.result() for each in done)
    results = await asyncio.gather(*running, return_exceptions=True)
    return answered + sum(result == 1 for result in results)


def later(task, turns):
    """Cancel a task after some turns of the event loop."""
    if turns:
        asyncio.get_running_loop().call_soon(later, task, turns - 1)
    else:
        task.cancel()


@pytest.mark.parametrize("num_requests", [2_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_requests_leave_nothing(llm, num_requests):
    rng, loop = random.Random(0), loop_of(llm)

    async def main():
        answered = await soak(llm, rng, range(WARM_UP))  # fills the caches of Python and asyncio
        before = await idle_blocks()
        answered += await soak(llm, rng, range(WARM_UP, num_requests))
        growth = await idle_blocks() - before
        assert len(asyncio.all_tasks()) == 1
        return answered, growth

    async def idle_blocks():
        """Return the number of memory blocks that Python has allocated while the engine is idle."""
        gc.collect()
        await loop.call_async(lambda: None)
        while loop.inbox:
            await asyncio.sleep(0)
        check_idle(llm)
        return sys.getallocatedblocks()

    answered, growth = asyncio.run(main())
    assert 0.5 * num_requests < answered < 0.95 * num_requests
    # An object that each request left would be 0.8 of a block.
    assert growth < 0.4 * (num_requests - WARM_UP)
