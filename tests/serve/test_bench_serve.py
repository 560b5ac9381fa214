"""``mie bench serve --base-url``: any server that speaks OpenAI's API, scripted here."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from live_server import live_bundled

import mie.cli
from mie.errors import ConfigError
from mie.sim.draws import Fixed
from mie.sim.loads import from_lengths, independent
from mie.sim.remote import Server, run_load_on
from mie.sim.workload import Answer, Text, Workload, WorkloadRequest

Script = Callable[[dict[str, Any]], tuple[int, list[Any]]]
"""A request's body -> the status, and the events of the stream or the body in a list."""


@contextmanager
def scripted(script: Script) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on a free port: its address, and the bodies that it got."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = {
                "/v1/models": {"data": [{"id": "scripted"}]},
                "/tokenizer_info": {"vocab_size": 100},
            }
            self.reply(200, json.dumps(answers[self.path]).encode(), "application/json")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body["_authorization"] = self.headers.get("Authorization")
            bodies.append(body)
            status, events = script(body)
            if status != 200:
                self.reply(status, json.dumps(events[0]).encode(), "application/json")
                return
            lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
            data = "".join(f"data: {line}\n\n" for line in lines)
            self.reply(200, data.encode(), "text/event-stream")

        def reply(self, status: int, data: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chunks(body: dict[str, Any], **more: Any) -> list[Any]:
    """The stream of mie and vLLM: token ids, and the usage at the end."""
    n, count = body.get("n", 1), body["max_tokens"]
    events: list[Any] = [
        {"choices": [{"index": index, "text": "x", "token_ids": [10 * index + at]}]}
        for at in range(count)
        for index in range(n)
    ]
    details = {"cached_tokens": 3}
    usage = {"completion_tokens": n * count, "prompt_tokens_details": details}
    return [*events, {"choices": [], "usage": usage, **more}, "[DONE]"]


def test_every_request_is_sent_and_its_tokens_are_counted():
    metrics = {"num_preemptions": 2, "queue_time_ms": 1.5}
    workload = independent(num_requests=5, input_len=Fixed(7), output_len=Fixed(4))
    with scripted(lambda body: (200, chunks(body, metrics=metrics))) as (url, bodies):
        result = run_load_on(Server(base_url=url + "/v1", api_key="secret"), workload)
    assert result.model == "scripted"
    assert [record.num_output for record in result.records] == [4] * 5
    assert result.num_cached_tokens == 15
    assert result.num_preempted == 10
    assert [record.queue for record in result.records] == [1_500_000] * 5
    assert result.num_steps is result.peak_blocks is None
    prompts = {tuple(request.token_ids(100, {})) for request in workload.requests}
    assert {tuple(body["prompt"]) for body in bodies} == prompts
    for body in bodies:
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (4, True, 0)
        assert body["_authorization"] == "Bearer secret"


def test_with_openai_only_no_field_is_sent_that_openai_lacks():
    """Chunks without token ids count as a token each, and usage has the rest."""

    def script(body: dict[str, Any]) -> tuple[int, list[Any]]:
        texts: list[Any] = [{"choices": [{"index": 0, "text": "ab"}]}] * 2
        return 200, [*texts, {"choices": [], "usage": {"completion_tokens": 4}}, "[DONE]"]

    server_fields = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    with scripted(script) as (url, bodies):
        server = Server(base_url=url, openai_only=True)
        result = run_load_on(server, from_lengths([(3, 4)]))
    [record] = result.records
    assert record.num_output == 4
    assert record.token_ns[0][1] == record.token_ns[0][3]
    assert result.num_preempted is None
    assert bodies[0].keys() - {"_authorization"} == server_fields


def test_an_answer_is_quoted_as_the_server_generated_it():
    requests = (
        WorkloadRequest(request_id="a", prompt=(Text(1, 3),), max_tokens=2, n=2),
        WorkloadRequest(request_id="b", prompt=(Answer("a", 1),), max_tokens=1, after="a"),
    )
    with scripted(lambda body: (200, chunks(body))) as (url, bodies):
        run_load_on(Server(base_url=url), Workload(name="quote", requests=requests))
    assert bodies[1]["prompt"] == [10, 11]


def test_a_closed_load_keeps_the_limit():
    lock, counts = threading.Lock(), [0, 0]
    both = threading.Barrier(2, timeout=60)

    def script(body: dict[str, Any]) -> tuple[int, list[Any]]:
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        both.wait()  # so that two are out at once
        with lock:
            counts[0] -= 1
        return 200, chunks(body)

    with scripted(script) as (url, _):
        result = run_load_on(Server(base_url=url), from_lengths([(2, 1)] * 8), max_concurrency=2)
    assert counts[1] == 2
    assert sorted(record.arrival_ns == 0 for record in result.records) == [False] * 6 + [True] * 2


BROKEN: dict[str, tuple[tuple[int, list[Any]], str]] = {
    "a refusal": ((429, [{"error": {"message": "the queue is full"}}]), "429: the queue is full"),
    "a refusal without a message": ((503, ["busy"]), '503: "busy"'),
    "an error in the stream": ((200, [{"error": {"message": "out of luck"}}]), "out of luck"),
    "no [DONE]": ((200, [{"choices": [{"index": 0, "text": "x"}]}]), "without [DONE]"),
    "no JSON": ((200, ["{"]), "JSONDecodeError"),
}


@pytest.mark.parametrize(("reply", "message"), BROKEN.values(), ids=list(BROKEN))
def test_a_request_that_fails_is_recorded_and_so_are_those_after_it(reply, message):
    requests = (
        WorkloadRequest(request_id="a", prompt=(Text(1, 3),), max_tokens=2),
        WorkloadRequest(request_id="b", prompt=(Text(2, 3),), max_tokens=2, after="a"),
    )
    with scripted(lambda body: reply) as (url, bodies):
        result = run_load_on(Server(base_url=url), Workload(name="load", requests=requests))
    first, second = result.records
    assert message in (first.error or "")
    assert second.error == "it depends on 'a', which failed"
    assert len(bodies) == 1


def test_a_server_that_does_not_answer_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no other process gets the port
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="does not answer GET /v1/models"):
            run_load_on(Server(base_url=url), from_lengths([(2, 1)]))


def test_what_openai_cannot_express_is_refused():
    requests = (WorkloadRequest(request_id="a", prompt=(Text(1, 3),), max_tokens=2, priority=1),)
    with pytest.raises(ConfigError, match="'a' has a priority"):
        run_load_on(
            Server(base_url="http://unused", openai_only=True),
            Workload(name="load", requests=requests),
        )


def test_a_measured_and_a_simulated_run_have_the_same_fields_and_one_table(tmp_path, capsys):
    load = ["--num-prompts", "6", "--input-len", "9", "--output-len", "3", "--goodput", "e2el:9e9"]
    measured, simulated = tmp_path / "measured.json", tmp_path / "simulated.json"
    with scripted(lambda body: (200, chunks(body))) as (url, _):
        command = ["bench", "serve", *load, "--base-url", url, "--output-json", str(measured)]
        assert mie.cli.main(command) == 0
    assert f"Measured over HTTP at {url}: scripted" in capsys.readouterr().out
    command = ["bench", "serve", *load, "--device", "a10g", "--output-json", str(simulated)]
    assert mie.cli.main(command) == 0
    found, expected = (json.loads(path.read_text()) for path in (measured, simulated))
    assert found.keys() - {"base_url"} == expected.keys() - {"device"}
    assert found["workload_sha256"] == expected["workload_sha256"]
    assert found["total_output_tokens"] == expected["total_output_tokens"] == 18
    assert found["completed"] == 6
    assert found["request_goodput"] == found["request_throughput"]
    capsys.readouterr()
    assert mie.cli.main(["bench", "compare", str(simulated), str(measured)]) == 0
    out = capsys.readouterr().out
    assert "simulated: Simulated: bundled on a10g" in out
    assert "different loads" not in out
    cells = [line.replace(" ", "") for line in out.splitlines()]
    assert "|Steps|3|–|" in cells
    assert "|Successfulrequests|6|6|" in cells


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base-url", "http://unused", "--num-blocks", "8"], "--num-blocks has no effect"),
        (["--base-url", "http://unused", "--device", "a10g"], "--device has no effect"),
        (["--openai-only"], "--openai-only needs --base-url"),
        (["--vocab-size", "9"], "--vocab-size needs --base-url"),
    ],
)
def test_options_without_effect_are_refused(options, message, capsys):
    assert mie.cli.main(["bench", "serve", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_file_without_results_is_an_error(tmp_path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "other.json"
    path.write_text("{}")
    assert mie.cli.main(["bench", "compare", str(path)]) == 2
    assert "holds no results of mie bench" in capsys.readouterr().err


def test_mie_serve_tells_all_that_a_server_can():
    """Tokens, cached tokens, preemptions and the time in the queue; and answers are quoted."""
    prefix = independent(num_requests=6, input_len=Fixed(9), output_len=Fixed(20), prefix_len=40)
    quoted = WorkloadRequest(
        request_id="more",
        prompt=(prefix.requests[5].prompt[0], Answer("5"), Text(99, 3)),  # a hit: "5" has ended
        max_tokens=5,
        after="5",
    )
    workload = Workload(name="load", requests=(*prefix.requests, quoted))
    with live_bundled() as url:
        result = run_load_on(Server(base_url=url), workload, reset_prefix_cache=True)
    assert [record.error for record in result.records] == [None] * 7
    assert [record.num_output for record in result.records] == [20] * 6 + [5]
    assert result.records[-1].num_prompt == 40 + 20 + 3
    assert result.num_cached_tokens > 0
    assert result.num_preempted is not None  # how many depends on when requests arrive
    for record in result.records:
        assert record.queue is not None
        assert record.ttft is not None
        assert 0 <= record.queue <= record.ttft <= record.e2el
