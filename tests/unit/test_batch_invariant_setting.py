"""Test ``batch_invariant`` on the CPU: refusals, the meaning of "auto", and the option."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from linear_layouts import needs_kernel

from mie import EngineConfig
from mie.cli.options import add_engine_options, engine_options
from mie.errors import ConfigError
from mie.load.backends import load_backend
from mie.ops_cpu import cpu_backend
from mie.ops_cpu.cpu_backend import CpuBackend
from mie.ops_cpu.linear.layout import Layout
from mie.ops_cpu.linear.probe import Probe
from mie.system.cache_dir import CacheError

SHAPES = ((64, 32), (128, 32))


def loaded(dtype: Any = np.float32, **settings: Any) -> CpuBackend:
    """Return a backend of one thread that keeps a matrix of each shape."""
    backend = load_backend("numpy", "float32", EngineConfig(num_threads=1, **settings))
    assert isinstance(backend, CpuBackend)
    for shape in SHAPES:
        backend.load_linear(shape, [np.ones(shape, dtype)])
    return backend


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the time that each plan takes for every shape, or for each of `SHAPES`."""

    def set_times(*seconds: dict[str, float]) -> None:
        times = {n: each for (n, _), each in zip(SHAPES, cycle(seconds), strict=False)}

        def ratio(
            probe: Probe, inputs: int, outputs: int, first: Layout | None, second: Layout
        ) -> float:
            name = "plain" if first is None else first.name
            return times[outputs][second.name] / times[outputs][name]

        monkeypatch.setattr(Probe, "_layout_ratio", ratio)
        monkeypatch.setattr(cpu_backend, "open_cache", lambda name: no_cache())
        if "packed" not in seconds[0]:
            monkeypatch.setattr(cpu_backend, "numpy_kernel", lambda: None)

    return set_times


def no_cache() -> None:
    raise CacheError("none here")


@pytest.mark.parametrize(
    "settings", [{"linear_plan": "plain"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}]
)
def test_settings_that_cannot_be_invariant_are_refused(settings: dict[str, str]) -> None:
    got = {"linear_plan": "auto", "kv_cache_dtype": "auto"} | settings
    message = (
        "batch_invariant=True needs linear_plan 'tiled', 'packed' or 'auto' and kv_cache_dtype "
        f"'auto' on the numpy backend; got {got['linear_plan']!r} and {got['kv_cache_dtype']!r}"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        loaded(batch_invariant=True, **settings)
    for setting in (False, "auto"):
        assert not loaded(batch_invariant=setting, **settings).is_batch_invariant


@pytest.mark.parametrize("setting", ["yes", "True", 1, None])
def test_another_value_is_refused_by_name(setting: Any) -> None:
    message = f"batch_invariant must be True, False or 'auto'; got {setting!r}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig(batch_invariant=setting)


TILED, PLAIN = {"tiled": 1.0, "plain": 2.0}, {"tiled": 2.0, "plain": 1.0}


@pytest.mark.parametrize(
    ("times", "expected"),
    [((TILED, TILED), True), ((TILED, PLAIN), False), ((PLAIN, PLAIN), False)],
)
def test_auto_is_on_if_every_plan_is_invariant(
    times: tuple[dict[str, float], ...], expected: bool, takes: Callable[..., None]
) -> None:
    takes(*times)
    assert loaded().is_batch_invariant is expected
    assert loaded(linear_plan="tiled").is_batch_invariant


CHEAP = {"tiled": 3.0, "packed": 1.0, "packed-invariant": 0.9}
DEAR = {"tiled": 3.0, "packed": 1.0, "packed-invariant": 1.5}
TILES_WIN = {"tiled": 0.5, "packed": 1.0, "packed-invariant": 1.02}
TILES_ARE_LEAST_DEAR = {"tiled": 1.5, "packed": 1.0, "packed-invariant": 3.0}


@pytest.mark.parametrize(
    ("times", "linear_plan", "expected", "forced"),
    [
        (TILED, "auto", "tiled", "tiled"),
        (PLAIN, "auto", "plain", "tiled"),
        (PLAIN, "tiled", "tiled", "tiled"),
        *(
            pytest.param(*case, marks=needs_kernel)
            for case in (
                (CHEAP, "auto", "packed-invariant", "packed-invariant"),
                (CHEAP, "packed", "packed-invariant", "packed-invariant"),
                (CHEAP, "tiled", "tiled", "tiled"),
                (DEAR, "auto", "packed", "packed-invariant"),
                (DEAR, "packed", "packed", "packed-invariant"),
                (DEAR, "tiled", "tiled", "tiled"),
                (TILES_WIN, "auto", "tiled", "tiled"),
                (TILES_WIN, "packed", "packed-invariant", "packed-invariant"),
                (TILES_ARE_LEAST_DEAR, "auto", "packed", "tiled"),
                (TILES_ARE_LEAST_DEAR, "packed", "packed", "packed-invariant"),
            )
        ),
    ],
)
def test_true_forces_invariant_plans_and_other_settings_use_the_probe(
    times: dict[str, float],
    linear_plan: str,
    expected: str,
    forced: str,
    takes: Callable[..., None],
) -> None:
    takes(times)
    for setting, name in ((True, forced), ("auto", expected), (False, expected)):
        backend = loaded(batch_invariant=setting, linear_plan=linear_plan)
        assert set(backend.linear_plans.values()) == {name}
        is_invariant = name not in ("plain", "packed")
        assert backend.linear_is_batch_invariant is is_invariant
        assert backend.is_batch_invariant is (is_invariant and setting is not False)


@pytest.mark.parametrize(
    ("times", "expected"),
    [(PLAIN, "tiled"), pytest.param(DEAR, "packed", marks=needs_kernel)],
)
def test_16_bit_weights_are_never_plain(
    times: dict[str, float], expected: str, takes: Callable[..., None]
) -> None:
    takes(times)
    backend = loaded(np.float16, weight_dtype="float16")
    assert set(backend.linear_plans.values()) == {expected}


def test_16_bit_weights_may_be_invariant() -> None:
    config = EngineConfig(batch_invariant=True, weight_dtype="float16")
    backend = load_backend("numpy", "float32", config)
    backend.load_linear((64, 32), [np.ones((64, 32), np.float16)])
    assert isinstance(backend, CpuBackend)
    assert backend.is_batch_invariant


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ([], {}),
        (["--batch-invariant"], {"batch_invariant": True}),
        (["--no-batch-invariant"], {"batch_invariant": False}),
    ],
)
def test_the_command_line_has_the_flag(flags: list[str], given: dict[str, bool]) -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    options = engine_options(parser.parse_args(flags))
    assert {k: v for k, v in options.items() if k == "batch_invariant"} == given


def test_plain_operators_refuse_it() -> None:
    with pytest.raises(ConfigError, match="batch_invariant"):
        load_backend("numpy-plain", "float32", EngineConfig(batch_invariant=True))
