"""Use one loaded `LLM` in several processes, as programs do. Each output is the parent's.

The model continues every prompt in another way, so that a text of another process would show.
"""

import http.client
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

import pytest
from audit import end_compile_worker, grammars_of
from command_line import python
from deadlines import within
from forks import children

from mie import LLM, SamplingParams
from mie.config.params.structured import StructuredOutputsParams
from mie.events.file import read_log
from mie.events.vocabulary import summary_of

# Python 3.12 warns of a fork beside threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

PATIENCE = 300
"""Seconds after which a wait has failed. Waits that succeed take no time."""
NAMES = ("Mia the fox", "Tom the owl", "Nora the hedgehog", "Hugo the tiger")
PROMPTS = [f"Tell me a story about {name}." for name in NAMES] + [
    f"Once upon a time, {name}" for name in NAMES
]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FORK: ForkContext = multiprocessing.get_context("fork")


@pytest.fixture(scope="module", params=["numpy", "jit"])
def llm(request: pytest.FixtureRequest) -> LLM:
    """Load a model with two threads."""
    if request.param == "jit":
        pytest.importorskip("numba")
    return LLM(
        "bundled", backend=request.param, num_blocks=400, num_threads=2, batch_invariant=True
    )


with_numpy = pytest.mark.parametrize("llm", ["numpy"], indirect=True)
"""Marks tests of programs that load a model of their own, or in which its threads do not matter."""


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, str]:
    """Return each prompt's text in the parent."""
    return {prompt: generated(llm, prompt) for prompt in PROMPTS}


@pytest.fixture(autouse=True)
def _nothing_leaks(llm: LLM) -> Iterator[None]:
    before = children()
    yield
    assert children() <= before
    llm.reset_prefix_cache()
    assert llm.engine.scheduler.manager.num_available == 400


def generated(llm: LLM, prompt: str) -> str:
    return llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].text


_shared: list[LLM] = []
"""The model that forked workers find, as a program's global variable."""


def answer(prompt: str) -> tuple[str, str, int]:
    return prompt, generated(_shared[0], prompt), os.getpid()


@pytest.fixture
def shared(llm: LLM) -> Iterator[LLM]:
    _shared.append(llm)
    yield llm
    _shared.clear()


@pytest.mark.usefixtures("shared")
def test_forked_workers_get_the_parents_answers(alone: dict[str, str]) -> None:
    with FORK.Pool(2) as pool:
        answers = pool.map(answer, PROMPTS * 2, chunksize=1)
        pool.close()
        within(pool.join)
    assert [(prompt, text) for prompt, text, _ in answers] == [(p, alone[p]) for p in PROMPTS * 2]
    assert os.getpid() not in {process for *_, process in answers}


def test_children_and_their_busy_parent_do_not_disturb_each_other(shared, alone) -> None:
    """Workers are forked and replaced while three threads generate in the parent."""
    stop, wrong = threading.Event(), []

    def keep_busy(first: int) -> None:
        at = first
        while not stop.is_set():
            prompt = PROMPTS[at % len(PROMPTS)]
            text = generated(shared, prompt)
            if text != alone[prompt]:
                wrong.append((prompt, text))
            at += 1

    threads = [threading.Thread(target=keep_busy, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    try:
        with FORK.Pool(2, maxtasksperchild=2) as pool:
            answers = pool.map(answer, PROMPTS, chunksize=1)
            pool.close()
            within(pool.join)
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert {prompt: text for prompt, text, _ in answers} == alone
    assert not wrong


@pytest.mark.slow
def test_a_hundred_children_forked_at_random_moments(shared: LLM, alone: dict[str, str]) -> None:
    """Each child runs a random batch beside a busy parent. Some are killed."""
    rng, stop = random.Random(3), threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            for prompt in PROMPTS:
                assert generated(shared, prompt) == alone[prompt]

    def child(prompts: list[str]) -> None:
        outputs = shared.generate(prompts, PARAMS, use_tqdm=False)
        texts = [output.outputs[0].text for output in outputs]
        os._exit(0 if texts == [alone[prompt] for prompt in prompts] else 3)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    try:
        for _ in range(25):
            time.sleep(rng.random() / 10)
            procs = [
                FORK.Process(target=child, args=(rng.sample(PROMPTS, rng.randint(1, 6)),))
                for _ in range(4)
            ]
            for each in procs:
                each.start()
            killed = rng.choice(procs)
            killed.kill()
            for each in procs:
                each.join(PATIENCE)
            codes = {each.exitcode for each in procs if each is not killed}
            assert codes == {0}
    finally:
        stop.set()
        thread.join(PATIENCE)


@pytest.mark.slow
@pytest.mark.usefixtures("shared")
def test_the_workers_of_a_data_loader(alone: dict[str, str]) -> None:
    """Each epoch forks workers anew. They take indices from queues and put results into one."""

    def worker(indices: Any, results: Any) -> None:
        for index in iter(indices.get, None):
            results.put((index, answer(PROMPTS[index])[1]))

    for _ in range(2):
        results: multiprocessing.Queue[tuple[int, str]] = FORK.Queue()
        queues: list[multiprocessing.Queue[int | None]] = [FORK.Queue() for _ in range(2)]
        procs = [FORK.Process(target=worker, args=(queue, results)) for queue in queues]
        for each in procs:
            each.start()
        for index in range(len(PROMPTS)):
            queues[index % 2].put(index)
        got = dict(results.get(timeout=PATIENCE) for _ in PROMPTS)
        for queue in queues:
            queue.put(None)
        for each in procs:
            each.join(PATIENCE)
        assert [got[index] for index in range(len(PROMPTS))] == list(alone.values())


def structured(number: int) -> str:
    """Return an output of a description that no other process has compiled."""
    constraint = StructuredOutputsParams(regex=f"[a-c]{{{number}}}")
    params = SamplingParams(temperature=0, max_tokens=24, structured_outputs=constraint)
    return _shared[0].generate("a", params, use_tqdm=False)[0].outputs[0].text


@with_numpy
def test_forked_workers_compile_structured_outputs_of_their_own(shared: LLM) -> None:
    assert len(structured(3)) == 3  # the parent's process that compiles is running
    with FORK.Pool(2) as pool:
        texts = pool.map(structured, range(4, 10), chunksize=1)
        pool.close()
        within(pool.join)
    assert [len(text) for text in texts] == [4, 5, 6, 7, 8, 9]
    assert len(structured(10)) == 10
    end_compile_worker(grammars_of(shared))


LOADS = """
    from mie import LLM, SamplingParams

    llm = None
    PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def answer(prompt):
        global llm
        llm = llm or LLM("bundled", num_blocks=400, batch_invariant=True)
        return llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].text
"""


def program(tmp_path: Path, text: str, name: str = "program.py") -> Path:
    path = tmp_path / name
    path.write_text(textwrap.dedent(LOADS) + textwrap.dedent(text))
    return path


@pytest.mark.slow
@with_numpy
def test_spawned_workers_load_their_own_model(tmp_path: Path, alone: dict[str, str]) -> None:
    path = program(
        tmp_path,
        """
        if __name__ == "__main__":
            import json, multiprocessing, sys
            answer("The parent has a model too.")
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(json.dumps(pool.map(answer, json.loads(sys.argv[1]), chunksize=1)))
        """,
    )
    assert json.loads(python(path, json.dumps(PROMPTS)).stdout) == list(alone.values())


@pytest.mark.slow
@with_numpy
def test_gunicorn_preloads_a_model_for_its_workers(tmp_path: Path, alone: dict[str, str]) -> None:
    pytest.importorskip("gunicorn")
    program(
        tmp_path,
        """
        import os, urllib.parse
        answer("The model is loaded before the workers are forked.")

        def app(environ, start_response):
            text = answer(urllib.parse.unquote(environ["QUERY_STRING"]))
            start_response("200 OK", [("x-worker", str(os.getpid()))])
            return [text.encode()]
        """,
        "preloaded.py",
    )
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "2", "--timeout", "0"]
    server = subprocess.Popen(
        [*command, "--no-control-socket", "--bind", f"unix:{path}", "preloaded:app"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + PATIENCE
        while not path.exists():
            assert server.poll() is None, server.stderr.read() if server.stderr else ""
            assert time.monotonic() < end
            time.sleep(0.05)
        got: dict[str, str] = {}
        workers: set[str] = set()

        def ask(prompts: list[str]) -> None:
            for prompt in prompts:
                got[prompt], worker = asked(path, prompt)
                workers.add(worker)

        threads = [threading.Thread(target=ask, args=(PROMPTS[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert got == alone
        assert str(server.pid) not in workers
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=PATIENCE)


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection to a socket in the file system."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self._path)


def asked(path: Path, prompt: str) -> tuple[str, str]:
    connection = UnixConnection(path)
    connection.request("GET", "/?" + prompt.replace(" ", "%20"))
    response = connection.getresponse()
    text, worker = response.read().decode(), response.headers["x-worker"]
    connection.close()
    return text, worker


@pytest.mark.slow
@with_numpy
def test_a_jupyter_kernel_and_the_pool_of_a_cell(tmp_path: Path, alone: dict[str, str]) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cell = f"""
    import json, multiprocessing
    prompts = {PROMPTS!r}
    texts = [answer(prompt) for prompt in prompts]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(answer, prompts, chunksize=1) == texts
    print(json.dumps(texts))
    """
    path = tmp_path / "run.py"
    path.write_text(
        "import nbclient, nbformat\n"
        f"cells = {[textwrap.dedent(LOADS), textwrap.dedent(cell)]!r}\n"
        "notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])\n"
        f"nbclient.NotebookClient(notebook, timeout={PATIENCE}).execute()\n"
        "print(notebook.cells[1].outputs[0].text)\n"
    )
    assert json.loads(python("-W", "ignore", path).stdout) == list(alone.values())


@with_numpy
def test_a_childs_steps_are_not_written_to_the_parents_trace(tmp_path, alone) -> None:
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:
        llm = LLM("bundled", num_blocks=400, batch_invariant=True, trace=file)
        texts = [generated(llm, PROMPTS[0])]
        child = FORK.Process(target=generated, args=(llm, PROMPTS[1]))
        child.start()
        child.join(PATIENCE)
        assert child.exitcode == 0
        texts.append(generated(llm, PROMPTS[2]))
    assert texts == [alone[PROMPTS[0]], alone[PROMPTS[2]]]
    numbers = [summary_of(step)["step"] for segment in read_log(path) for step in segment.steps]
    assert numbers == list(range(1, len(numbers) + 1))
