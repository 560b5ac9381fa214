"""Spans reach a collector that speaks OTLP, and belong to the client's trace."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from edge_helpers import load, server_of

from mie.errors import MissingExtraError
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys
from mie.serve.server import Server

trace_service = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="the extra otel is not installed",
    exc_type=ImportError,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def collector():
    """A server that takes spans, with its URL and the spans that it got."""
    spans = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            request = trace_service.ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    server.shutdown()
    thread.join()
    server.server_close()


def attributes_of(span):
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


async def test_each_request_is_a_span_of_its_clients_trace(collector):
    url, spans = collector
    headers = {"authorization": "Bearer sk", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    prompt = "A prompt that must not leak"
    options = {"otlp_traces_endpoint": url, "keys": Keys.of(["sk"])}
    async with server_of(load(), **options) as running:
        body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True}
        for number in range(2):
            response = await running.client.post(
                "/v1/completions", json=body, headers=headers if number == 0 else {}
            )
            assert response.status_code == (200 if number == 0 else 401)
        await running.client.get("/health")
    served, refused = sorted(spans, key=lambda span: span.start_time_unix_nano)
    assert served.name == "llm_request"
    assert (served.trace_id.hex(), served.parent_span_id.hex()) == (TRACE, PARENT)
    assert served.end_time_unix_nano > served.start_time_unix_nano
    found = attributes_of(served)
    assert found["gen_ai.usage.prompt_tokens"] > 3
    assert found["gen_ai.usage.completion_tokens"] == 3
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.time_to_first_token"]
    assert found["http.route"] == "/v1/completions"
    assert found["http.response.status_code"] == 200
    assert found["mie.key"] == "key-1"
    assert found["mie.preemptions"] == 0
    assert prompt not in str(served)
    assert not refused.parent_span_id
    assert refused.trace_id.hex() != TRACE
    assert attributes_of(refused)["http.response.status_code"] == 401
    assert refused.status.code == 2


def test_without_its_packages_the_option_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    engine = load()
    try:
        with pytest.raises(MissingExtraError, match=r"pip install 'mie\[otel\]'"):
            Server(engine, ServeConfig(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"))
    finally:
        engine.shutdown()
