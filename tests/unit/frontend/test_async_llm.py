"""Test `AsyncLLM`: concurrent requests from asyncio."""

import asyncio
import gc

import pytest
from audit import check_scheduler
from forks import exit_code_of_child

from mie import LLM, AsyncLLM, SamplingParams
from mie.config.params.sampling import RequestOutputKind
from mie.errors import EngineDeadError

PROMPTS = ("Once upon a time", "Tell me a story about Mia", "The old mill", "A silver bell")


@pytest.fixture(scope="module")
def alone():
    """The text of each prompt when no other request runs."""
    llm = LLM("bundled", max_num_seqs=4)
    return [llm.generate([p], params(), use_tqdm=False)[0].outputs[0].text for p in PROMPTS]


@pytest.fixture
def llm():
    llm = AsyncLLM("bundled", max_num_seqs=4)
    yield llm
    engine = llm.loop.engine
    if llm.is_running:
        asyncio.run(settled(llm))
        assert not llm.loop.processor.has_requests
        assert engine.scheduler.manager.num_used == 0
        check_scheduler(engine.scheduler)
    llm.shutdown()
    assert not llm.loop._thread.is_alive()


async def settled(llm):
    """Wait until the engine has run its commands. It then has no work if every caller is gone."""
    gc.collect()
    await llm.loop.call_async(lambda: None)
    assert not llm.loop.engine.has_work


def params(max_tokens=12, **more):
    return SamplingParams(temperature=1, seed=3, max_tokens=max_tokens, ignore_eos=True, **more)


async def text_of(llm, prompt, sampling=None, **labels):
    text = ""
    async for output in llm.generate(prompt, sampling or params(), **labels):
        text += output.outputs[0].new_text
    assert output.finished
    assert output.outputs[0].text == text
    return text


def test_a_slow_consumer_gets_merged_outputs(llm, alone):
    async def main():
        outputs = llm.generate(PROMPTS[0], params(output_kind=RequestOutputKind.DELTA))
        first = await anext(outputs)
        while llm.loop.processor.has_requests:  # the engine has finished the request
            await asyncio.sleep(0)
        return first, [output async for output in outputs]

    first, rest = asyncio.run(main())
    assert len(rest) <= 2
    pieces = [first, *rest]
    assert "".join(output.outputs[0].text for output in pieces) == alone[0]


def test_a_dead_engine_notifies_every_caller(llm):
    async def main():
        outputs = [llm.generate(p, params(max_tokens=1000)) for p in PROMPTS]
        for each in outputs:
            await anext(each)
        await llm.check_health()

        def broken(plan):
            raise OSError("the device is gone")

        llm.loop.engine.runner.launch = broken
        results = await asyncio.gather(*map(drained, outputs), return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 4
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await llm.check_health()
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await anext(llm.generate("x", params()))
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()
        assert llm.errored
        assert not llm.is_running
        assert isinstance(llm.dead_error, EngineDeadError)

    async def drained(outputs):
        async for _ in outputs:
            pass

    asyncio.run(main())


def test_shutdown_ends_the_thread_and_running_requests():
    async def main():
        async with AsyncLLM("bundled") as llm:
            assert llm.is_running
            config = await llm.get_model_config()
            assert config.max_model_len == llm.loop.engine.max_model_len
            assert (await llm.get_tokenizer()).encode("x")
            outputs = llm.generate(PROMPTS[0], params(max_tokens=1000))
            await anext(outputs)
            thread = llm.loop._thread
        assert not thread.is_alive()
        with pytest.raises(EngineDeadError, match="was shut down"):
            async for _ in outputs:
                pass
        with pytest.raises(EngineDeadError, match="was shut down"):
            await anext(llm.generate("x"))

    asyncio.run(main())


def test_a_forked_child_is_refused_with_a_remedy(llm):
    def child():
        with pytest.raises(EngineDeadError, match="belongs to the parent process"):
            asyncio.run(text_of(llm, PROMPTS[0]))

    asyncio.run(text_of(llm, PROMPTS[0]))
    assert exit_code_of_child(child) == 0
