"""Test the arrivals of requests and the records, on a clock whose steps take 10 ns."""

from mie.config.engine import EngineConfig
from mie.lab.metrics import RequestRecord
from mie.lab.sim.costs import Costs
from mie.lab.sim.driver import Bench, LoadResult, run_load
from mie.lab.sim.simulated import simulated
from mie.lab.workload import Answer, Text, Workload, WorkloadRequest

STEP = 10


def bench(**settings: int) -> Bench:
    """Return a bench whose steps take ten nanoseconds."""
    sizes = {"num_blocks": 64, "block_size": 4, **settings}
    return simulated(Costs(step_ps=1000 * STEP), EngineConfig(**sizes))


def record_of(result: LoadResult, request_id: str) -> RequestRecord:
    (record,) = [record for record in result.records if record.request_id == request_id]
    return record


def workload(*requests: WorkloadRequest) -> Workload:
    return Workload(name="test", requests=requests)


def request(request_id: str, arrival_ns: int = 0, **values: object) -> WorkloadRequest:
    given = {"prompt": (Text(ord(request_id[0]), 5),), "max_tokens": 3, **values}
    return WorkloadRequest(request_id=request_id, arrival_ns=arrival_ns, **given)


def test_a_request_that_arrives_during_a_step_waits_for_its_end():
    result = run_load(bench(), workload(request("b", 13), request("a"), request("c", 1000)))
    assert [record.request_id for record in result.records] == ["b", "a", "c"]
    assert record_of(result, "a").token_ns == [[10, 20, 30]]
    assert record_of(result, "c").token_ns == [[1010, 1020, 1030]]
    record = record_of(result, "b")
    assert (record.arrival_ns, record.first_step_ns, record.queue) == (13, 20, 7)
    assert record.token_ns == [[30, 40, 50]]


def test_a_turn_comes_after_its_answer_and_the_time_to_think():
    result = run_load(bench(), workload(request("a"), request("b", 25, after="a")))
    assert record_of(result, "b").arrival_ns == 30 + 25


def test_an_answer_is_quoted_as_it_was_generated():
    """The second prompt consists of the first prompt and its answer.

    The prefix cache has all of it except the last token, which was never stored.
    """
    second = request("b", after="a", prompt=(Text(97, 5), Answer("a"), Text(9, 2)))
    result = run_load(bench(), workload(request("a", max_tokens=8), second))
    assert record_of(result, "b").num_prompt == 5 + 8 + 2
    assert record_of(result, "b").num_cached == 5 + 8 - 1


def test_max_concurrency_delays_the_next_request():
    requests = [request("a"), request("b"), request("c", 5), request("d", 1000)]
    result = run_load(bench(), workload(*requests), max_concurrency=2)
    assert [record.arrival_ns for record in result.records] == [0, 0, 30, 1000]
    assert result.peak_running == 2


def test_refused_requests_are_recorded_with_their_dependents():
    long = request("a", prompt=(Text(1, 5000),))
    requests = [long, request("b", after="a"), request("c", after="b"), request("d")]
    result = run_load(bench(), workload(*requests), max_concurrency=1)
    errors = [record.error for record in result.records]
    assert "prompt has 5000 tokens" in str(errors[0])
    assert errors[1:] == [
        "it depends on 'a', which was refused",
        "it depends on 'b', which was refused",
        None,
    ]
    assert record_of(result, "d").num_output == 3
