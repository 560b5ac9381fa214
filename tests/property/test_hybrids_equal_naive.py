"""Check that models with recurrent layers give the oracle's tokens under any schedule.

The scenarios are those of dense models, with few slots for states on the device and on the host.
"""

import pytest
from compiled import needs_numba
from hypothesis import given, settings
from hypothesis import strategies as st
from rare import check_until_seen
from test_engine_equals_naive import check_scenario, scenarios, seen
from tiny_hybrids import HYBRIDS, TinyHybrid

from mie.checkpoint.config import load_model_config
from mie.ops.numpy_backend import NumpyBackend

NUM_SCENARIOS = 25
OFTEN = (
    *("prefix hits", "evict", "preempted by recompute", "preempted by swap", "resumed by swap"),
    *("fork", "wait", "aborts", "forced", "copies, fork", "snapshots", "snapshots evicted"),
)


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrids")
    return {name: TinyHybrid(folder / name, config) for name, config in HYBRIDS.items()}


@st.composite
def hybrid_scenarios(draw):
    scenario = draw(scenarios())
    scenario["model"] = draw(st.sampled_from(sorted(HYBRIDS)))
    config = scenario["config"]
    config["async_scheduling"] = False
    config["preemption_mode"] = draw(st.sampled_from(["swap", "swap", "recompute"]))
    if not config["enable_chunked_prefill"]:
        config |= {"enable_prefix_caching": False, "max_cached_blocks": None}
    num_spare = draw(st.sampled_from([12, 4, 2, 1, 0, -1]))
    scenario["num_states"] = max(1, config["max_num_seqs"] + num_spare)
    scenario["num_host_states"] = draw(st.sampled_from([1, 2, 8]))
    return scenario | {"num_host_blocks": 0}


def state_bytes(model, backend):
    config = load_model_config(model.directory)
    machine = NumpyBackend("float64" if backend == "numpy" else "float32")
    return machine.recurrent.state_bytes(config.recurrent.shape) * config.layers_recurrent.count(
        True
    )


def in_bytes(scenario, size):
    """Return the scenario with the numbers of states as sizes in bytes."""
    config = scenario["config"] | {"state_memory": scenario["num_states"] * size}
    if config["preemption_mode"] == "swap":
        config["swap_space"] = scenario["num_host_states"] * 4 * size + (1 << 14)
    return scenario | {"config": config}


@given(scenario=hybrid_scenarios())
@settings(max_examples=NUM_SCENARIOS if settings().max_examples < 1000 else 1000)
def check_scenarios(hybrids, backend, scenario):
    size = state_bytes(hybrids[scenario["model"]], backend)
    check_scenario(hybrids, backend, in_bytes(scenario, size))


@pytest.mark.parametrize("backend", ["numpy", pytest.param("jit", marks=needs_numba)])
def test_hybrids_equal_naive(hybrids, backend):
    wanted = dict.fromkeys(OFTEN, 2)
    check_until_seen(lambda check: check(hybrids, backend), check_scenarios, seen, wanted)
