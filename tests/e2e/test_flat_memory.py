"""Check that memory does not grow in a long decode loop."""

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from audit import kv_cache_of

from mie import EngineConfig, SamplingParams
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings


def resident_kib(kind="VmRSS") -> int:
    """Return the resident memory of this process in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{kind}:")[1].split()[0])


def decode(engine, num_steps, rng):
    """Keep four requests running. They differ, so that the prefix cache fills and evicts."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    target = engine.stats.num_steps + num_steps
    while engine.stats.num_steps < target:
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 4:
            engine.add_request(rng.integers(4, 40, 8).tolist(), params)
        engine.step()


@pytest.mark.parametrize("backend", ["jit", pytest.param("numpy", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_logged", "num_measured"), [(1000, 300), pytest.param(2000, 800, marks=pytest.mark.slow)]
)
def test_memory_stays_flat(tiny, backend, num_logged, num_measured):
    rng = np.random.default_rng(0)
    config = EngineConfig(num_blocks=64, event_log_steps=500)
    logged = load_engine(tiny["llama"].directory, LoadSettings(engine=config, backend=backend))
    decode(logged, num_logged, rng)  # the event log fills
    # The heap of a process that ran other tests may still settle once. A leak grows every time.
    growths = []
    for _ in range(3):
        rss = resident_kib()
        decode(logged, num_logged, rng)
        growths.append(resident_kib() - rss)
        if growths[-1] < 1024:
            break
    assert growths[-1] < 1024, f"RSS grew by {growths} KiB"
    # Steps are slow under tracemalloc. Fewer steps show the same exactly.
    config = EngineConfig(num_blocks=64, event_log_steps=0)
    engine = load_engine(tiny["llama"].directory, LoadSettings(engine=config, backend=backend))
    cache = kv_cache_of(engine)
    elements = cache.elements if backend == "jit" else cache
    address = elements.ctypes.data
    decode(engine, num_measured + 200, rng)  # so that no request is under way below
    tracemalloc.start()
    try:
        decode(engine, 1000, rng)  # NumPy keeps small arrays of every size for the next ones
        assert engine.reset_prefix_cache()  # how much it holds depends on the tokens
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        decode(engine, num_measured, rng)
        assert engine.reset_prefix_cache()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert abs(after - before) < 32 * 1024, "Python objects grew"
    assert kv_cache_of(engine) is cache
    assert elements.ctypes.data == address
    assert logged.stats.num_steps == (1 + len(growths)) * num_logged
