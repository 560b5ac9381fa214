"""Test that steps which helper processes share give the bits of steps without them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import exit_code_of_child
from interrupts import KINDS, Injector
from linear_layouts import needs_kernel
from shared_steps import PATIENCE, configs, count_shares, crew_of, share_always
from tiny_models import LLAMA, random_weights, write_model

from mie import EngineConfig, SamplingParams
from mie.load.engine import load_engine
from mie.ops_cpu import crew as crew_module
from mie.ops_cpu.attention.shared import SharedAttention
from mie.ops_cpu.linear import shared as shared_products
from mie.ops_cpu.processes import helpers as helpers_module

pytestmark = pytest.mark.skipif(
    not helpers_module.IS_AVAILABLE, reason="helper processes need Linux's eventfd and pidfd"
)
NEVER = 1 << 62
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Share any work of any model. Count the calls that share work with usable helpers."""
    share_always(monkeypatch)
    return count_shares(monkeypatch)


# Engines.

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 1, 4, 1, 5], [9] * 20, [2, 7]]
MODELS = configs(window=9)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("models")
    return {
        name: write_model(base / name, config, random_weights(config))
        for name, config in MODELS.items()
    }


def new_engine(directory: Any, **settings: Any) -> Any:
    defaults = {"num_blocks": 64, "num_threads": 2, "block_size": 4, "linear_plan": "tiled"}
    return load_engine(directory, EngineConfig(**defaults | settings))


def generate(
    engine: Any, max_tokens: int = 20, each_step: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Return the tokens, and the log-probabilities of tokens and prompts."""
    found: dict[str, Any] = {}
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_tokens=max_tokens + number,
            ignore_eos=True,
            temperature=number % 2,
            seed=number,
            logprobs=5,
            prompt_logprobs=2 if number == 0 else None,
        )
        engine.add_request(prompt, params, str(number))
    while engine.has_work:
        each_step()
        output = engine.step()
        for new in output.outputs:
            rows = [(each.token_ids, each.logprobs) for each in new.logprobs]
            found.setdefault(new.request_id, []).append((new.token_ids, rows))
        for name, prompt_rows in output.prompt_logprobs.items():
            found[f"prompt {name}"] = [(each.token_ids, each.logprobs) for each in prompt_rows]
    return found


def without_helpers(directory: Any, **settings: Any) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew_module, "START_BYTES", NEVER)
        engine = new_engine(directory, **settings)
        found = generate(engine)
        assert crew_of(engine)._team is None
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_invariant": True},
        {"batch_invariant": True, "max_num_batched_tokens": 3},
        pytest.param({"batch_invariant": True, "linear_plan": "packed"}, marks=needs_kernel),
        {"kv_cache_dtype": "int8", "enable_prefix_caching": False},
        {"kv_cache_dtype": "fp8", "enable_prefix_caching": False},
    ],
    ids=["invariant", "short chunks", "packed", "int8 cache", "fp8 cache"],
)
def test_an_engine_gives_the_same(
    model: str, settings: dict[str, Any], directories: dict[str, Any], calls: Counter[str]
) -> None:
    wanted = without_helpers(directories[model], **settings)
    assert not calls
    engine = new_engine(directories[model], **settings)
    for _ in range(2):
        assert generate(engine) == wanted
    assert calls["shared"] > 100
    assert not crew_of(engine)._team.helpers.have_failed


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the products and the layers of attention that the processes share."""
    shared: Counter[str] = Counter()
    attend, multiply = SharedAttention.run, shared_products.SharedProducts.apply

    def attended(own: SharedAttention, *arguments: Any) -> Any:
        shared["attention"] += own._helpers._is_together
        return attend(own, *arguments)

    def multiplied(own: shared_products.SharedProducts, *arguments: Any, **settings: Any) -> Any:
        shared["products"] += own.helpers._is_together
        return multiply(own, *arguments, **settings)

    monkeypatch.setattr(SharedAttention, "run", attended)
    monkeypatch.setattr(shared_products.SharedProducts, "apply", multiplied)
    return shared


def complete(engine: Any) -> dict[str, list[int]]:
    """Return the tokens of two samples of each of several prompts that begin alike."""
    found: dict[str, list[int]] = {}
    shared_prefix = [5, 6, 7, 8] * 4
    for number in range(4):
        params = SamplingParams(
            max_tokens=16 + number, ignore_eos=True, temperature=1.0, seed=number, n=2
        )
        engine.add_request([*shared_prefix, number + 1], params, str(number))
    while engine.has_work:
        for new in engine.step().outputs:
            found.setdefault(f"{new.request_id} {new.index}", []).extend(new.token_ids)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_three_processes_give_the_same_with_preemption_and_shared_prompts(
    model: str, directories: dict[str, Any], calls: Counter[str], shared: Counter[str]
) -> None:
    settings = {
        "num_threads": 3,
        "num_blocks": 24,
        "enable_prefix_caching": True,
        "batch_invariant": True,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew_module, "START_BYTES", NEVER)
        wanted = complete(new_engine(directories[model], **settings))
    assert not calls
    engine = new_engine(directories[model], **settings)
    for _ in range(2):
        assert complete(engine) == wanted
    assert engine.stats.num_preemptions > 0
    assert shared["attention"] > 50
    assert shared["products"] > 50
    assert not crew_of(engine)._team.helpers.have_failed


def test_small_products_are_not_shared(
    directories: dict[str, Any], shared: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = without_helpers(directories["llama"])
    monkeypatch.setattr(shared_products, "LEAST_BYTES", NEVER)
    engine = new_engine(directories["llama"])
    assert generate(engine) == wanted
    assert shared["attention"] > 0
    assert shared["products"] == 0


def test_two_engines_may_run_at_once(directories: dict[str, Any]) -> None:
    wanted = {name: without_helpers(path) for name, path in directories.items()}
    found: dict[str, Any] = {}

    def work(name: str) -> None:
        found[name] = generate(new_engine(directories[name]))

    threads = [threading.Thread(target=work, args=(name,)) for name in directories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == wanted


def test_an_engine_is_freed_at_once_with_its_helpers(directories: dict[str, Any]) -> None:
    engine = new_engine(directories["llama"])
    generate(engine)
    pids = [helper._pid for helper in crew_of(engine)._team.helpers._helpers]
    attention = engine._runner.backend._attention
    matrix = engine._runner.decoder._head
    freed = [weakref.ref(each) for each in (matrix.tiles, attention.cache)]
    del attention, matrix
    gc.collect()
    gc.disable()
    try:
        del engine
        assert [each() is None for each in freed] == [True, True]
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    finally:
        gc.enable()


def test_the_memory_of_a_helper_does_not_grow(tmp_path: Any) -> None:
    """Plans and products that a helper prepares for some steps are freed or used again."""
    config = LLAMA | {"eos_token_id": 39, "num_hidden_layers": 1}
    directory = write_model(tmp_path, config, random_weights(config))
    engine, num_steps = new_engine(directory), 0
    resident = []
    for wanted_steps in (500, 2000):
        while num_steps < wanted_steps:
            if not engine.has_work:
                params = SamplingParams(max_tokens=40, ignore_eos=True)
                engine.add_request([1, 2, 3 + num_steps % 30], params, str(num_steps))
            engine.step()
            num_steps += 1
        [helper] = crew_of(engine)._team.helpers._helpers
        resident.append((helper._pid, resident_bytes(helper._pid)))
    (pid, before), (last_pid, after) = resident
    assert pid == last_pid
    assert after - before < 4 << 20


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("what", ["fork", "eventfd", "pidfd_open", "mmap"])
def test_an_engine_goes_on_where_helpers_cannot_start(
    what: str,
    directories: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = without_helpers(directories["llama"])

    def fails(*_: Any) -> Any:
        raise MemoryError("planted") if what == "mmap" else OSError(11, "planted")

    engine = new_engine(directories["llama"])
    if what == "mmap":
        monkeypatch.setattr(shared_products, "shared_zeros", fails)
    else:
        monkeypatch.setattr(os, what, fails)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        assert generate(engine) == wanted
    [record] = caplog.records
    assert "could not be started" in record.message
    assert "planted" in record.message


@pytest.mark.parametrize("how", ["killed", "stopped for a while", "both"])
def test_helpers_that_die_or_stop_at_any_step_change_nothing(
    how: str,
    directories: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A thread kills or stops them whenever it gets to it."""
    wanted = without_helpers(directories["llama"])
    monkeypatch.setattr(helpers_module, "PATIENCE", PATIENCE)
    for seed in range(2):
        engine, rng = new_engine(directories["llama"]), np.random.default_rng(seed)
        num_steps, at = 0, int(rng.integers(1, 20))
        threads: list[threading.Thread] = []

        def strike(pid: int, pause: float) -> None:
            threading.Event().wait(pause)
            with contextlib.suppress(ProcessLookupError):
                if how != "killed":
                    os.kill(pid, signal.SIGSTOP)
                    threading.Event().wait(0.02)
                os.kill(pid, signal.SIGCONT if how == "stopped for a while" else signal.SIGKILL)

        def each_step(
            engine: Any = engine,
            threads: list[threading.Thread] = threads,
            at: int = at,
            rng: np.random.Generator = rng,
        ) -> None:
            nonlocal num_steps
            num_steps += 1
            team = crew_of(engine)._team
            if team is None or num_steps < at or (threads and how != "stopped for a while"):
                return
            pid, pause = team.helpers._helpers[0]._pid, rng.random() * 3e-3
            threads.append(threading.Thread(target=strike, args=(pid, pause)))
            threads[-1].start()

        assert generate(engine, each_step=each_step) == wanted
        for thread in threads:
            thread.join(PATIENCE)
        assert threads
        assert len(caplog.records) <= seed + 1


def test_a_fork_while_a_step_runs_disturbs_neither(directories: dict[str, Any]) -> None:
    """The child computes with an engine of its own."""
    wanted = without_helpers(directories["llama"])
    engine = new_engine(directories["llama"])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(generate(engine) for _ in range(3)))
    thread.start()

    def action() -> None:
        crew_of(engine)._find_team(crew_of(engine)._forward())
        assert crew_of(engine)._team is None or crew_of(engine)._team.helpers.are_usable
        crew_of(engine).close()

    for _ in range(3):
        assert exit_code_of_child(action) == 0
    thread.join(PATIENCE)
    assert found == [wanted] * 3
    assert not crew_of(engine)._team.helpers.have_failed


def test_an_engine_runs_in_a_forked_child_with_helpers_of_its_own(
    directories: dict[str, Any], calls: Counter[str]
) -> None:
    wanted = without_helpers(directories["llama"])
    engine = new_engine(directories["llama"])
    assert generate(engine) == wanted

    def action() -> None:
        calls.clear()
        assert generate(engine) == wanted
        assert calls["shared"] > 100

    assert exit_code_of_child(action) == 0
    assert generate(engine) == wanted
    assert not crew_of(engine)._team.helpers.have_failed


def test_an_engine_survives_interrupts_at_any_line(directories: dict[str, Any]) -> None:
    """After each one the engine goes on, or is given up. No token may differ."""
    if sys.gettrace() is not None:
        pytest.skip("another tracer is at work")
    wanted = without_helpers(directories["llama"])
    rng = np.random.default_rng(0)
    for _ in range(4):
        engine = new_engine(directories["llama"])
        injector = Injector(KINDS["SIGINT"][0], int(rng.integers(1, 60_000)))
        with contextlib.suppress(KeyboardInterrupt):
            injector.run(lambda engine=engine: generate(engine))
        for number in range(len(PROMPTS)):
            engine.abort(str(number))
        while engine.has_work:
            engine.step()
        assert generate(engine) == wanted, injector.where
