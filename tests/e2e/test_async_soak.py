"""Check that many concurrent requests, 30 % of them cancelled, leave nothing behind."""

import asyncio
import gc
import itertools
import random
import sys

import pytest
from audit import check_idle, loop_of
from scripted_llm import expected, new_llm

from mie import AsyncLLM, SamplingParams

PART = 1_000
"""Requests between two counts of memory."""
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


@pytest.mark.parametrize("num_parts", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_requests_leave_nothing(llm, num_parts):
    rng, loop = random.Random(0), loop_of(llm)

    async def main():
        answered, blocks = 0, []
        for part in range(num_parts):
            answered += await soak(llm, rng, range(part * PART, (part + 1) * PART))
            blocks.append(await idle_blocks())
        assert len(asyncio.all_tasks()) == 1
        return answered, blocks

    async def idle_blocks():
        """Return the number of memory blocks that Python has allocated while the engine is idle."""
        gc.collect()
        await loop.call_async(lambda: None)
        while loop.inbox:
            await asyncio.sleep(0)
        check_idle(llm)
        return sys.getallocatedblocks()

    answered, blocks = asyncio.run(main())
    assert 0.5 * num_parts * PART < answered < 0.95 * num_parts * PART
    # The first part fills the caches of Python and asyncio, and another part may grow one of them.
    # An object that each request left would be 0.8 of a block in every part.
    growths = [after - before for before, after in itertools.pairwise(blocks)]
    assert min(growths) < 0.4 * PART, growths
