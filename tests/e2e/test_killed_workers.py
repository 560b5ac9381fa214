"""Kill the workers that render templates and compile grammars while requests run.

Each answer is the undisturbed one or a clear error. Nothing hangs and nothing is left behind.
"""

import asyncio
import gc
import os
import random
import signal
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from audit import (
    compile_worker,
    engine_of,
    forget_grammars,
    grammars_of,
    render_worker,
    renderer_of,
)
from forks import children

from mie import AsyncLLM, SamplingParams
from mie.errors import WorkerError

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

DESCRIPTIONS: list[dict[str, Any]] = [
    {"choice": ["otter", "fox", "owl"]},
    {"regex": "[a-c]{3,9}!"},
    {"json": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}},
    {"grammar": 'start: "a" start "b" | "c"'},
]
TOO_COSTLY = {"json": {"multipleOf": 99_999_989}}


class Requests:
    """The requests of a round, and their undisturbed answers."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.expected: dict[int, str] = {}

    async def answer(self, number: int) -> str:
        """Return the text of one of the requests, which need one worker or the other."""
        greedy = {"temperature": 0.0, "max_tokens": 12}
        if number < len(DESCRIPTIONS):
            prompt: Any = "Once upon a time"
            params = SamplingParams(**greedy, structured_outputs=DESCRIPTIONS[number])
        else:
            prompt = await self._llm.chat_prompt([{"role": "user", "content": f"Story {number}"}])
            params = SamplingParams(**greedy)
        text = ""
        async for output in self._llm.generate(prompt, params):
            text = output.outputs[0].text
        return text

    async def costly(self) -> None:
        """Ask for something that the worker does not finish, and leave."""
        params = SamplingParams(structured_outputs=TOO_COSTLY)
        with suppress(asyncio.TimeoutError, WorkerError):
            await asyncio.wait_for(self._llm.generate("Once", params).__anext__(), 0.02)

    async def round(self, draw: random.Random, seen: Counter[str]) -> None:
        """Run all requests while a worker is killed at some moment."""
        forget_grammars(self._llm)
        killing = asyncio.create_task(self.kill(draw))
        jobs = [self.answer(number) for number in range(len(DESCRIPTIONS) + 2)]
        *answers, _ = await asyncio.gather(*jobs, self.costly(), return_exceptions=True)
        await killing
        for number, answer in enumerate(answers):
            if isinstance(answer, WorkerError):
                assert "worker process" in str(answer)
                seen["errors"] += 1
            else:
                assert answer == self.expected[number], answer
                seen["answers"] += 1

    async def kill(self, draw: random.Random) -> None:
        await asyncio.sleep(draw.random() * 0.1)
        workers = [render_worker(renderer_of(self._llm)), compile_worker(grammars_of(self._llm))]
        draw.shuffle(workers)
        for worker in workers[: draw.choice([1, 1, 2])]:
            if worker is not None:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def rounds(count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    before = children()
    async with AsyncLLM("bundled", dtype="float64", num_threads=1, num_blocks=256) as llm:
        requests = Requests(llm)
        for number in range(len(DESCRIPTIONS) + 2):
            requests.expected[number] = await requests.answer(number)
        num_files, num_threads = open_files(), threading.active_count()
        draw = random.Random(count)
        for _ in range(count):
            await asyncio.wait_for(requests.round(draw, seen), 300)
        for number in range(len(DESCRIPTIONS) + 2):
            assert await requests.answer(number) == requests.expected[number]
        assert engine_of(llm).scheduler.manager.num_used == 0
        assert len(children() - before) <= 2, "a worker was left behind"
        assert open_files() <= num_files + 2  # the thread's, if it has not ended yet
        assert threading.active_count() <= num_threads + 8, "threads were left behind"
        renderer = renderer_of(llm)
    renderer.close()
    del llm, requests, renderer
    gc.collect()
    assert children() <= before, "a worker was left behind"
    return seen


@pytest.mark.parametrize(
    ("count", "errors", "answers"), [(3, 0, 3), pytest.param(500, 50, 500, marks=pytest.mark.slow)]
)
def test_rounds_of_killed_workers(count: int, errors: int, answers: int):
    seen = asyncio.run(rounds(count))
    assert seen["errors"] >= errors, seen
    assert seen["answers"] > answers, seen
