"""`/metrics` in Prometheus' text format: the engine's metrics under vLLM's names, and HTTP's."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from starlette.responses import Response

from mie.base.stats.metric import Counter, Gauge, Histogram, Metric, Tally
from mie.base.threads import call_in_thread
from mie.engine.watch.metrics import Snapshot
from mie.errors import EngineDeadError
from mie.frontend.async_llm import AsyncLLM
from mie.serve.asgi import CLIENT_LEFT

logger = logging.getLogger(__name__)

LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens", "max_answer_bytes")
SNAPSHOT_SECONDS = 5.0
"""Time after which a scrape gets the engine's numbers of the scrape before."""
REQUEST_TIMES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds; the limits of HTTP requests' durations."""

HELP = {
    "mie:answer_bytes": "Memory that the plan leaves to the log-probabilities of answers.",
    "vllm:num_requests_running": "Sequences that run.",
    "vllm:num_requests_waiting": "Sequences that wait.",
    "vllm:kv_cache_usage_perc": "Fraction of the KV cache's blocks that are in use (0 … 1).",
    "vllm:cache_config_info": "Settings of the KV cache, as labels.",
    "vllm:e2e_request_latency_seconds": "Time from arrival to the last token.",
    "vllm:time_to_first_token_seconds": "Time from arrival to the first token.",
    "vllm:inter_token_latency_seconds": "Time between two tokens of a choice.",
    "mie:request_latency_seconds": "Time from arrival to the last token, in fine buckets.",
    "mie:kv_blocks": "Blocks by state; shared counts entries of tables that sharing saves.",
    "mie:state_slots": "Slots of recurrent states by use.",
    "mie:snapshots_taken": "Snapshots of recurrent states that were taken.",
    "mie:snapshots_evicted": "Snapshots that made room for other states.",
    "mie:step_seconds": "Time of the engine's steps by phase.",
    "mie:batch_rows": "Tokens of prompts, and decodes, in a step.",
    "mie:cow_copies": "Blocks copied because a shared block was written.",
    "mie:tool_calls": "Calls of tools in answers.",
    "mie:tool_calls_unparsed": "Opening tags of calls that no call followed, and that stayed text.",
    "mie:tokens_recomputed": "Tokens computed again after a preemption.",
    "vllm:external_prefix_cache_queries": "Prompt tokens that were looked up on the disk.",
    "vllm:external_prefix_cache_hits": "Prompt tokens whose blocks were read from the disk.",
    "mie:prompt_tokens_from_disk": "Tokens of answered prompts whose blocks came from the disk.",
    "mie:disk_blocks_read": "Blocks that were read from the disk.",
    "mie:disk_blocks_written": "Blocks that were written to the disk.",
    "mie:disk_blocks_damaged": "Blocks and files of the disk that were damaged, so not used.",
    "mie:disk_blocks_dropped": "Blocks that were not written, because the writer was behind.",
    "mie:prefix_departures": "Prompts that were not cached to their end, by the reason.",
    "mie:tokens_forced": "Tokens of structured outputs that were determined, so not sampled.",
}
"""Descriptions of some metrics. The others have their names."""


class ServerMetrics:
    """The counts of one app. Each app has a registry, so that apps in one process do not mix."""

    def __init__(
        self,
        engine: AsyncLLM | None,
        model_name: str,
        others: Callable[[], Iterable["ServerMetrics"]] = tuple,
    ) -> None:
        """``model_name`` is the name of the only model, or empty.

        A scrape also has the metrics of ``others``, such as each loaded model.
        """
        self._engine = engine
        self.model_name = model_name
        self._others = others
        self._rejections = dict.fromkeys(LIMITS, 0)
        self._requests: dict[tuple[str, str, str], int] = {}
        self._times: dict[str, Tally] = {}
        self._num_left = 0
        self._num_calls = 0
        self._num_unparsed_calls = 0
        self._snapshot: Snapshot | None = None

    def reject(self, limit: str) -> None:
        """Count requests that were refused because of a limit."""
        self._rejections[limit] += 1

    def observe(
        self, handler: str, method: str, status: int, seconds: float, facts: Mapping[str, Any]
    ) -> None:
        """Count an HTTP request when it has ended. ``facts`` are the fields of its log line."""
        key = (handler, method, f"{status // 100}xx")
        self._requests[key] = self._requests.get(key, 0) + 1
        tally = self._times.get(handler)
        if tally is None:
            tally = self._times[handler] = Tally(REQUEST_TIMES)
        tally.observe(seconds)
        self._num_left += status == CLIENT_LEFT
        self._num_calls += facts.get("num_tool_calls") or 0
        self._num_unparsed_calls += facts.get("num_unparsed_calls") or 0

    async def scrape(self) -> Response:
        """Answer a scrape. Each engine's thread takes a snapshot, and waits for nothing else."""
        told = [self, *self._others()]
        await asyncio.gather(*(each.refresh() for each in told))

        def write() -> bytes:
            return generate_latest(
                _Fixed(families(chain.from_iterable(each.read() for each in told)))
            )

        # OpenMetrics would spell "vllm:" as "vllm_", even for a client that prefers it.
        content = await call_in_thread(write)
        return Response(
            content, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def refresh(self) -> None:
        """Take a new snapshot of the engine's numbers."""
        if self._engine is None:
            return
        try:
            asked = self._engine.metrics_snapshot()
            self._snapshot = await asyncio.wait_for(asked, SNAPSHOT_SECONDS)
        except EngineDeadError:
            self._snapshot = None
        except asyncio.TimeoutError:
            pass  # the step is long, or hangs, and the last snapshot still holds
        except Exception as error:
            logger.error("the engine's numbers come from an earlier scrape", exc_info=error)

    def read(self) -> list[Metric]:
        """Return the numbers of the engine, and of HTTP."""
        snapshot = self._snapshot  # another scrape may replace it meanwhile
        labels = {"model_name": self.model_name}
        both = {**labels, "engine": "0"}
        return [
            *(() if snapshot is None else snapshot.read(self.model_name)),
            *(
                Counter(name="vllm:admission_rejections", labels={**labels, "reason": r}, value=n)
                for r, n in self._rejections.items()
            ),
            Counter(name="mie:http_clients_disconnected", labels=both, value=self._num_left),
            Counter(name="mie:tool_calls", labels=both, value=self._num_calls),
            Counter(name="mie:tool_calls_unparsed", labels=both, value=self._num_unparsed_calls),
            *(
                Counter(
                    name="http_requests",
                    labels={"handler": handler, "method": method, "status": status},
                    value=count,
                )
                for (handler, method, status), count in self._requests.copy().items()
            ),
            *(
                tally.read("http_request_duration_seconds", {"handler": handler})
                for handler, tally in self._times.copy().items()
            ),
        ]


class _Fixed(Collector):
    """A collector of given families."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Sequence[Family]:
        return self._families


def families(metrics: Iterable[Metric]) -> list[Family]:
    """Return metrics as families of Prometheus' client; equal names become one family."""
    found: dict[str, Family] = {}
    for metric in metrics:
        family = found.get(metric.name)
        if family is None:
            family = found[metric.name] = _family(metric)
        values = list(metric.labels.values())
        if isinstance(metric, Histogram) and isinstance(family, HistogramMetricFamily):
            family.add_metric(values, list(metric.buckets.items()), metric.sum)
        elif isinstance(metric, (Counter, Gauge)):
            family.add_metric(values, metric.value)  # type: ignore[attr-defined]
    return list(found.values())


def _family(metric: Metric) -> Family:
    kinds = {
        Counter: CounterMetricFamily,
        Gauge: GaugeMetricFamily,
        Histogram: HistogramMetricFamily,
    }
    help = HELP.get(metric.name, metric.name.rpartition(":")[2].replace("_", " "))
    family: Family = kinds[type(metric)](metric.name, help, labels=list(metric.labels))
    return family
