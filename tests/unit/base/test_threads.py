"""A thread that the system refuses is a clear error, and nothing is lost."""

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deadlines import join

from mie import AsyncLLM, SamplingParams
from mie.base.threads import start_thread
from mie.errors import ThreadLimitError
from mie.serve.page.processes import Worker

REFUSED = r"the system refuses another thread \(.*\); this process has \d+ \(raise the limit"
PARAMS = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let the system refuse every new thread while it is told to."""
    start = threading.Thread.start
    refuses = False

    def start_or_refuse(self: threading.Thread) -> None:
        if refuses:
            raise RuntimeError("can't start new thread")
        start(self)

    def refuse(now: bool) -> None:
        nonlocal refuses
        refuses = now

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    return refuse


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system has no /proc")
def test_the_system_knows_the_names_of_threads() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="mie-with-a-long-name")
    start_thread(thread)
    worker = Worker("mie-a-page")
    try:
        comm = Path(f"/proc/self/task/{thread.native_id}/comm")
        assert comm.read_text() == "mie-with-a-long\n"
        assert (
            asyncio.run(worker.call(Path("/proc/thread-self/comm").read_text)) == "mie-a-page_0\n"
        )
    finally:
        end.set()
        join(thread)
        worker.close()


def test_an_async_llm_without_its_thread_leaves_nothing(no_threads: Callable[[bool], None]):
    no_threads(True)
    with pytest.raises(ThreadLimitError, match=REFUSED):
        AsyncLLM("bundled", num_blocks=16, num_threads=1)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is AsyncLLM]
    no_threads(False)
    AsyncLLM("bundled", num_blocks=16, num_threads=1).shutdown()


def test_requests_that_run_go_on_and_new_ones_get_the_error(no_threads: Callable[[bool], None]):
    async def main() -> None:
        async with AsyncLLM("bundled", num_blocks=32) as llm:
            stream = llm.generate("Once upon a time", PARAMS, "1")
            outputs = [await anext(stream)]
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            no_threads(True)
            with pytest.raises(ThreadLimitError, match=REFUSED):
                await anext(llm.generate("Once", PARAMS, "2"))
            outputs += [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason == "length"
            assert await llm.get_num_unfinished_requests() == 0
            no_threads(False)
            again = [output async for output in llm.generate("Once", PARAMS, "2")]
            assert again[-1].finished
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            no_threads(True)  # also when it ends
        no_threads(False)
        assert llm.is_stopped

    asyncio.run(main())
