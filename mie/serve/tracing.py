"""OpenTelemetry: one span for each request, with the names that vLLM gives its attributes.

The packages are the extra ``otel``. A request that carries a ``traceparent`` header becomes part of
its client's trace. No span contains text that a client sent.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from starlette.types import Scope

from mie.errors import MissingExtraError
from mie.serve.asgi import OPEN_ROUTES, facts_of, header, route_of
from mie.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SECONDS = 5.0
"""Time after which spans are given up that the endpoint does not take."""

ATTRIBUTES = {
    "num_prompt_tokens": "gen_ai.usage.prompt_tokens",
    "num_output_tokens": "gen_ai.usage.completion_tokens",
    "queue_seconds": "gen_ai.latency.time_in_queue",
    "first_token_seconds": "gen_ai.latency.time_to_first_token",
    "num_cached_tokens": "mie.cached_tokens",
    "num_preemptions": "mie.preemptions",
    "num_swaps": "mie.swaps",
    "num_recomputed_tokens": "mie.recomputed_tokens",
    "num_copied_blocks": "mie.copied_blocks",
}
"""The facts of a request's log line -> attributes of its span."""


def new_provider(endpoint: str) -> TracerProvider:
    """Return a provider that sends spans to an OTLP endpoint over HTTP, from a separate thread.

    Raises:
        MissingExtraError: the extra ``otel`` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingExtraError(
            f"--otlp-traces-endpoint needs the package {error.name} (install it with: pip install "
            "'mie[otel]')"
        ) from error
    resource = Resource.create({"service.name": "mie", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=SECONDS))
    )
    return provider


class Tracing:
    """Makes a span of each request that asks for work."""

    def __init__(self, provider: TracerProvider, model_name: str, paths: Collection[str]) -> None:
        """``paths`` are those of the routes; a span names no other path."""
        self._paths = frozenset(paths)
        self._model_name = model_name
        self._tracer = provider.get_tracer("mie.serve", __version__)

    def record(self, scope: Scope, status: int, start_ns: int) -> None:
        """Send the span of a request that has ended. ``start_ns`` is in the Unix epoch."""
        path = route_of(scope)
        if scope["method"] != "POST" or path in OPEN_ROUTES:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        names = ("traceparent", "tracestate")
        carrier = {name: header(scope, name.encode()) or "" for name in names}
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            start_time=start_ns,
        )
        facts = facts_of(scope)
        attributes = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": scope.get("mie.request_id"),
            "http.request.method": "POST",
            "http.route": path if path in self._paths else None,
            "http.response.status_code": status,
            "mie.key": scope.get("mie.client"),
            **{ATTRIBUTES[name]: facts.get(name) for name in ATTRIBUTES},
        }
        found = {name: value for name, value in attributes.items() if value is not None}
        span.set_attributes(found)
        span.set_status(Status(StatusCode.ERROR if status >= 400 else StatusCode.OK))
        span.end()
