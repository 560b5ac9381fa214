"""Check that descriptions which cost too much are refused, and that others are served meanwhile."""

import json
import string
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from audit import compile_worker, grammars_of
from forks import cpu_seconds_of_children
from live_server import INVARIANT, live

from mie import AsyncLLM
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys
from mie.structured.compiler import Compiler

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

PATH = "/v1/completions"
FREE = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
TWO_KEYS = ServeConfig(keys=Keys.of(["key-of-A", "key-of-B"]))


def hostile(number: int) -> dict[str, Any]:
    """Return a request of 1.8 kB that takes all of the CPU time or memory of a description."""
    letters = string.ascii_letters[number:] + string.ascii_letters[:number]
    patterns = [{"type": "string", "pattern": f".*{letter}.{{9}}"} for letter in letters[:40]]
    return {**FREE, "structured_outputs": {"json": {"allOf": patterns}}}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("bundled", max_num_seqs=8, num_blocks=512, **INVARIANT)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def url(engine: AsyncLLM) -> Iterator[str]:
    with live(engine, TWO_KEYS) as url:
        yield url


def client(url: str, key: str) -> httpx2.Client:
    headers = {"authorization": f"Bearer key-of-{key}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=300)


def test_a_stream_and_new_requests_are_served_beside_hostile_ones(
    url: str, monkeypatch: pytest.MonkeyPatch
):
    ended: list[Hashable] = []  # the callers whose descriptions have had their turn
    before: dict[Hashable, int] = {}  # how many had theirs when a caller came
    submit = Compiler.submit

    def watched(self: Compiler, description: Any, caller: Hashable) -> Future[Any]:
        before.setdefault(caller, len(ended))
        future = submit(self, description, caller)
        future.add_done_callback(lambda _: ended.append(caller))
        return future

    monkeypatch.setattr(Compiler, "submit", watched)

    def ask(key: str, body: dict[str, Any]) -> httpx2.Response:
        with client(url, key) as own:
            return own.post(PATH, json=body)

    stream = {**FREE, "max_tokens": 400, "ignore_eos": True, "stream": True}
    shaped = {**FREE, "structured_outputs": {"choice": ["yes", "no"]}}
    with (
        ThreadPoolExecutor(12) as pool,
        client(url, "B") as own,
        own.stream("POST", PATH, json=stream) as running,
    ):
        lines = running.iter_lines()
        assert next(lines).startswith("data: {")
        refused = [pool.submit(ask, "A", hostile(i)) for i in range(1, 4)]
        free, constrained = (pool.submit(ask, "B", body) for body in (FREE, shaped))
        assert free.result().status_code == 200
        assert constrained.result().json()["choices"][0]["text"] in ("yes", "no")
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert [each.result().status_code for each in refused] == [400] * 3
    assert len(ended) == 4
    [of_b] = [caller for caller in before if ended.count(caller) == 1]
    assert ended.index(of_b) - before[of_b] <= 2, "its turn comes after one or two of A's"


def test_hostile_requests_whose_clients_left_are_not_compiled(url: str, engine: AsyncLLM):
    with client(url, "A") as own:
        own.post(PATH, json={**FREE, "structured_outputs": {"regex": "first"}})
    before = compiled_seconds(engine)
    for number in range(10, 34):
        leave(url, hostile(number))
    with client(url, "A") as own:
        answer = own.post(PATH, json={**FREE, "structured_outputs": {"regex": "then"}})
    assert answer.json()["choices"][0]["text"] == "then"
    assert compiled_seconds(engine) - before < 8  # they would take 15 to 24 s


def leave(url: str, body: dict[str, Any]) -> None:
    """Send a request and close its connection once it is read."""
    soon = httpx2.Timeout(60, read=0.05)
    with client(url, "A") as own, pytest.raises(httpx2.ReadTimeout):
        own.post(PATH, json=body, timeout=soon)


def compiled_seconds(engine: AsyncLLM) -> float:
    """Return the CPU time of everything that the worker has compiled."""
    worker = compile_worker(grammars_of(engine))
    assert worker is not None
    return cpu_seconds_of_children(worker.pid)


IMPOSSIBLE = {"structured_outputs": {"regex": "[xy]{60}((a{1000}){1000}){1000}"}}


def test_an_output_that_turns_out_impossible_is_the_clients_error(url: str):
    with client(url, "A") as own:
        answer = own.post(PATH, json={**FREE, "max_tokens": 100, **IMPOSSIBLE})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "request_failed")
        assert "structured_outputs cannot be followed" in error["message"]
        body = {**FREE, "max_tokens": 100, "stream": True, **IMPOSSIBLE}
        answer = own.post(PATH, json=body)
    if answer.status_code == 200:  # something was sent before it failed
        *_, last, done, _ = answer.text.split("\n\n")
        assert done == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"


def test_masks_that_cost_too_much_end_the_request(url: str):
    """An ambiguous grammar compiles at once, and its masks take longer and longer."""
    text = 'start: s\ns: s s | s s s | s s s s | "a" | "b"'
    body = {**FREE, "max_tokens": 800, "structured_outputs": {"grammar": text}, "min_tokens": 800}
    with client(url, "A") as own:
        answer = own.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "its masks took more than 0.5 s of CPU time" in message


@pytest.mark.slow
def test_a_worker_that_was_killed_is_the_servers_error(url: str, engine: AsyncLLM):
    with client(url, "A") as own, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(own.post, PATH, json=hostile(45))
        for _ in range(6000):
            worker = compile_worker(grammars_of(engine))
            if worker and Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text():
                break
            time.sleep(0.01)
        assert worker is not None
        worker.kill()
        answer = waiting.result()
    assert answer.status_code == 500, answer.text
    assert "the worker process ended (signal 9)" in answer.json()["error"]["message"]
