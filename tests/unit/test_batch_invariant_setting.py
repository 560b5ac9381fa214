"""Test ``batch_invariant`` on the CPU: refusals, the meaning of "auto", and the option."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mie import EngineConfig
from mie.cli.options import add_engine_options, engine_options
from mie.errors import ConfigError
from mie.load.backends import load_backend
from mie.ops_cpu.cpu_backend import CpuBackend
from mie.ops_cpu.linear.probe import Found, Probe

SHAPES = ((64, 32), (128, 32))


def loaded(**settings: Any) -> CpuBackend:
    """Return a backend of one thread that keeps a matrix of each shape."""
    backend = load_backend("numpy", "float32", EngineConfig(num_threads=1, **settings))
    assert isinstance(backend, CpuBackend)
    for shape in SHAPES:
        backend.load_linear(shape, [np.ones(shape, np.float32)])
    return backend


@pytest.fixture
def probe_says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the plan that the probe finds for each of `SHAPES`."""

    def say(*plans: str) -> None:
        found = {num_outputs: plan for (num_outputs, _), plan in zip(SHAPES, plans, strict=True)}
        monkeypatch.setattr(
            Probe, "plan", lambda probe, inputs, outputs: Found(found[outputs], 1.0)
        )

    return say


@pytest.mark.parametrize(
    "settings", [{"linear_plan": "plain"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}]
)
def test_settings_that_cannot_be_invariant_are_refused(settings: dict[str, str]) -> None:
    got = {"linear_plan": "auto", "kv_cache_dtype": "auto"} | settings
    message = (
        "batch_invariant=True needs linear_plan 'tiled' or 'auto' and kv_cache_dtype 'auto' on "
        f"the numpy backend; got {got['linear_plan']!r} and {got['kv_cache_dtype']!r}"
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


@pytest.mark.parametrize(
    ("plans", "expected"),
    [(("tiled", "tiled"), True), (("tiled", "plain"), False), (("plain", "plain"), False)],
)
def test_auto_is_on_if_every_plan_is_tiled(
    plans: tuple[str, str], expected: bool, probe_says: Callable[..., None]
) -> None:
    probe_says(*plans)
    assert loaded().is_batch_invariant is expected
    assert loaded(linear_plan="tiled").is_batch_invariant


def test_true_forces_tiled_plans_and_false_uses_the_probe(probe_says: Callable[..., None]) -> None:
    probe_says("plain", "plain")
    backend = loaded(batch_invariant=True)
    assert set(backend.linear_plans.values()) == {"tiled"}
    assert backend.is_batch_invariant
    assert set(loaded(batch_invariant=False).linear_plans.values()) == {"plain"}
    probe_says("tiled", "tiled")
    assert not loaded(batch_invariant=False).is_batch_invariant


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
