"""Check that models with recurrent layers give the oracle's tokens under any schedule.

The scenarios are those of dense models, without what needs the states of others or of the past.
"""

import pytest
from compiled import needs_numba
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_equals_naive import check_scenario, scenarios, seen
from tiny_hybrids import HYBRIDS, TinyHybrid

NUM_SCENARIOS = 40
OFTEN = ("preempted by recompute", "fork", "wait", "aborts", "forced", "copies, fork")


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrids")
    return {name: TinyHybrid(folder / name, config) for name, config in HYBRIDS.items()}


@st.composite
def hybrid_scenarios(draw):
    scenario = draw(scenarios())
    scenario["model"] = draw(st.sampled_from(sorted(HYBRIDS)))
    scenario["config"] |= {"preemption_mode": "recompute", "async_scheduling": False}
    return scenario | {"num_host_blocks": 0}


@given(scenario=hybrid_scenarios())
@settings(max_examples=max(NUM_SCENARIOS, settings().max_examples))
def check_scenarios(hybrids, backend, scenario):
    check_scenario(hybrids, backend, scenario)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("backend", ["numpy", pytest.param("jit", marks=needs_numba)])
def test_hybrids_equal_naive(hybrids, backend):
    seen.clear()
    check_scenarios(hybrids, backend)
    assert seen["prefix hits"] == seen["evict"] == 0, "nothing is shared"
    for what in OFTEN:
        assert seen[what] >= 3, (what, seen)
