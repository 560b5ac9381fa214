"""Compare metrics with brute force: NumPy's percentiles, and sums over lists of times."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.errors import ConfigError
from mie.lab.metrics import Goodput, RequestRecord, latencies, mean_and_std, percentile, summarize

MS = 1_000_000
values = st.lists(st.integers(0, 10**12) | st.floats(0, 1e12), min_size=1, max_size=40)


@given(values, st.floats(0, 100))
def test_percentiles_are_numpys(numbers: list, percent: float):
    assert percentile(numbers, percent) == pytest.approx(
        float(np.percentile(np.array(numbers, np.float64), percent)), rel=1e-9, abs=1e-6
    )


@given(values)
def test_mean_and_deviation_are_numpys(numbers: list):
    mean, std = mean_and_std(numbers)
    assert mean == pytest.approx(np.mean(numbers), rel=1e-12)
    assert std == pytest.approx(np.std(np.array(numbers, np.float64)), rel=1e-6, abs=1e-3)


@st.composite
def records(draw: st.DrawFn) -> RequestRecord:
    arrival = draw(st.integers(0, 50))
    first_step = arrival + draw(st.integers(0, 20))
    tokens = [
        sorted(draw(st.sets(st.integers(first_step + 1, first_step + 200), min_size=1, max_size=6)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return RequestRecord(
        request_id="x",
        num_prompt=draw(st.integers(1, 9)),
        arrival_ns=arrival,
        first_step_ns=first_step,
        token_ns=tokens,
    )


@given(st.lists(records(), max_size=6), st.integers(0, 120), st.integers(0, 60))
def test_a_summary_equals_a_computation_from_the_times(found, ttft, tpot):
    duration = max((record.end_ns for record in found), default=0)
    limits = Goodput(ttft=ttft / MS, tpot=tpot / MS)
    summary = summarize(found, duration, percentiles=(25, 99.9), goodput=limits)
    times, gaps, rates, good, num_output = [], [], [], 0, 0
    for record in found:
        own_rates = []
        for choice in record.token_ns:
            num_output += len(choice)
            for i in range(1, len(choice)):
                gaps.append(choice[i] - choice[i - 1])
            if len(choice) > 1:
                own_rates.append((choice[-1] - choice[0]) / (len(choice) - 1))
        rates += own_rates
        first = min(choice[0] for choice in record.token_ns)
        last = max(choice[-1] for choice in record.token_ns)
        times.append((first - record.arrival_ns, last - record.arrival_ns))
        good += first - record.arrival_ns <= ttft and all(rate <= tpot for rate in own_rates)
    expected = {
        "ttft": [time for time, _ in times],
        "e2el": [time for _, time in times],
        "itl": gaps,
        "tpot": rates,
        "queue": [record.first_step_ns - record.arrival_ns for record in found],
    }
    for name, numbers in expected.items():
        assert sorted(latencies(found, name)) == sorted(numbers)
        for what, percent in (("median", 50), ("p25", 25), ("p99.9", 99.9)):
            value = summary[f"{what}_{name}_ms"]
            if numbers:
                assert value == pytest.approx(np.percentile(numbers, percent) / MS, rel=1e-9)
            else:
                assert value is None
    seconds = max(1, duration) / 1e9
    num_input = sum(record.num_prompt for record in found)
    for name, count in (
        ("request_throughput", len(found)),
        ("request_goodput", good),
        ("output_throughput", num_output),
        ("total_token_throughput", num_output + num_input),
    ):
        assert summary[name] == pytest.approx(count / seconds, rel=1e-12), name


def test_refused_requests_count_as_failed_and_not_as_good():
    refused = RequestRecord(request_id="x", num_prompt=9, arrival_ns=0, error="too long")
    summary = summarize([refused], 10, goodput=Goodput())
    assert (summary["completed"], summary["failed"], summary["request_goodput"]) == (0, 1, 0)
    assert summary["total_input_tokens"] == 0


def test_goodput_is_parsed():
    assert Goodput.parse(["ttft:500", "e2el:2.5"]) == Goodput(ttft=500.0, e2el=2.5)
    for words, message in (("ttft", "understood"), ("itl:5", "itl"), ("ttft:-1", "goodput ttft")):
        with pytest.raises(ConfigError, match=message):
            Goodput.parse([words])
