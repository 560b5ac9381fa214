"""Test the probe that chooses a plan, and the answers that it stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear_layouts import KERNEL, needs_kernel

from mie.config.engine import EngineConfig
from mie.load.backends import load_backend
from mie.ops_cpu import cpu_backend
from mie.ops_cpu.linear import probe as probe_module
from mie.ops_cpu.linear.geometry import Geometry
from mie.ops_cpu.linear.kernel import Kernel
from mie.ops_cpu.linear.plain import PlainPlan
from mie.ops_cpu.linear.plan_answers import Answer, PlanAnswers
from mie.ops_cpu.linear.probe import Found, Probe, machine_key
from mie.ops_cpu.linear.tiled import TiledPlan
from mie.ops_cpu.threads.blas import Blas
from mie.ops_cpu.threads.workers import Workers

FASTEST = probe_module._fastest
"""The real one: `conftest.py` puts fixed times in its place."""
WIDTH_RATIO = Probe._width_ratio
"""As above."""


@pytest.fixture
def new_probe() -> Iterator[Callable[..., Probe]]:
    workers = Workers(1)
    plain = PlainPlan(np.dtype("float32"), workers)

    def new(
        folder: Path | None = None, machine: str = "here", kernel: Kernel | None = None
    ) -> Probe:
        tiled = TiledPlan(np.dtype("float32"), workers, kernel=kernel)
        parts = ("", ", layouts", ", widths")
        return Probe(plain, tiled, *(PlanAnswers(folder, f"{machine}{each}") for each in parts))

    yield new
    workers.close()


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The ratios, time of tiled by that of plain, that the rounds to come will find."""
    ratios: list[float] = []
    monkeypatch.setattr(Probe, "_layout_ratio", lambda *_: ratios.pop(0))
    return ratios


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> list[date]:
    """The day that the probe takes it to be: the last in the list."""
    days = [date(2026, 11, 22)]
    monkeypatch.setattr(probe_module, "_today", lambda: days[-1])
    return days


@pytest.mark.parametrize(
    ("ratios", "wanted", "is_kept"),
    [
        ([0.5, 0.6, 0.4], "tiled", True),
        ([0.95, 0.9, 0.9], "tiled", True),
        ([1.2, 1.3, 3.0], "plain", True),
        ([0.5, 0.6, 1.0], "tiled", False),  # within the margin
        ([1.2, 1.3, 1.1], "tiled", False),
        ([3.0, 4.0, 0.5], "tiled", False),  # another program was busy
        ([0.3, 0.3, 9.0], "tiled", False),
    ],
)
def test_an_answer_is_stored_if_all_rounds_agree_by_a_margin(
    ratios: list[float],
    wanted: str,
    is_kept: bool,
    tmp_path: Path,
    new_probe: Callable[..., Probe],
    rounds: list[float],
    today: list[date],
):
    probe = new_probe(tmp_path)
    rounds += ratios
    assert probe.plan(64, 128).choice == wanted
    assert rounds == []
    assert probe.plan(64, 128).choice == wanted  # not tried again by the same process
    kept = probe.answers.get("float32 64x128")
    assert (kept is not None) == is_kept
    if kept is not None:
        assert kept == Answer(
            machine="here",
            shape="float32 64x128",
            plan=wanted,
            ratio=sorted(ratios)[1],
            day="2026-11-22",
        )


def test_an_answer_is_for_its_machine_and_shape(
    tmp_path: Path, new_probe: Callable[..., Probe], rounds: list[float]
):
    rounds += [3.0] * 3
    assert new_probe(tmp_path).plan(64, 128).choice == "plain"
    assert new_probe(tmp_path).plan(64, 128).choice == "plain"
    rounds += [0.3] * 3
    assert new_probe(tmp_path, machine="there").plan(64, 128).choice == "tiled"
    rounds += [0.3] * 3
    assert new_probe(tmp_path).plan(128, 64).choice == "tiled"
    assert new_probe(tmp_path).plan(64, 128).choice == "plain"
    assert rounds == []
    assert len(list(tmp_path.iterdir())) == 6  # with the widths


def test_an_old_answer_is_tried_again(
    tmp_path: Path, new_probe: Callable[..., Probe], rounds: list[float], today: list[date]
):
    rounds += [3.0] * 3
    assert new_probe(tmp_path).plan(64, 128).choice == "plain"
    today.append(date(2026, 12, 22))
    assert new_probe(tmp_path).plan(64, 128).choice == "plain"
    today.append(date(2026, 12, 23))
    rounds += [0.3, 3.0, 1.0]
    assert new_probe(tmp_path).plan(64, 128).choice == "plain"  # Nothing clear: keep the old one.
    rounds += [0.3] * 3
    assert new_probe(tmp_path).plan(64, 128).choice == "tiled"
    assert new_probe(tmp_path).plan(64, 128).choice == "tiled"
    today.append(date(2020, 1, 1))  # The clock was wrong.
    rounds += [3.0] * 3
    assert new_probe(tmp_path).plan(64, 128).choice == "plain"
    assert rounds == []


def test_a_round_compares_both_plans(new_probe: Callable[..., Probe], monkeypatch):
    monkeypatch.setattr(probe_module, "_fastest", FASTEST)
    assert new_probe().plan(64, 128).choice in ("plain", "tiled")
    monkeypatch.setattr(probe_module, "_fastest", lambda applies, x: [2.0, len(x) * 1.0])
    probe = new_probe()
    ratio = probe._layout_ratio(64, 128, None, probe.invariant(64, 128))
    assert ratio == pytest.approx((4 * 16 * 128) ** (1 / 3) / 2)


@needs_kernel
def test_invariant_tiles_that_are_slow_only_for_prompts_are_not_chosen(
    new_probe: Callable[..., Probe], monkeypatch: pytest.MonkeyPatch
):
    def fastest(applies: Sequence[Any], x: np.ndarray) -> list[float]:
        names = [apply.__self__.layout.name for apply in applies]
        cost = {"packed-invariant": 1.7 if len(x) > 100 else 1.0, "packed": 1.0, "tiled": 3.0}
        return [cost[name] for name in names]

    monkeypatch.setattr(probe_module, "_fastest", fastest)
    assert new_probe(kernel=KERNEL).plan(576, 960).choice == "packed"


@needs_kernel
def test_a_round_compares_layouts(new_probe: Callable[..., Probe], monkeypatch):
    probe = new_probe(kernel=KERNEL)
    compared: list[list[str]] = []

    def fastest(applies: Sequence[Any], x: np.ndarray) -> list[float]:
        matrices = [apply.__self__ for apply in applies]
        compared.append([each.layout.name for each in matrices])
        results = [each.apply(x, None) for each in matrices]
        np.testing.assert_allclose(results[0], 32.0)  # 64 numbers of 0.5
        np.testing.assert_array_equal(*results)
        return [1.0, 2.0]

    monkeypatch.setattr(probe_module, "_fastest", fastest)
    assert probe.plan(64, 192) == ("packed", 2.0)
    wanted = [["tiled", "packed-invariant"], ["packed", "tiled"]]
    assert [each for number, each in enumerate(compared) if each not in compared[:number]] == wanted


@needs_kernel
@pytest.mark.parametrize(
    ("seconds", "invariant", "wanted"),
    [
        ({"tiled": 3, "packed": 1, "packed-invariant": 0.9}, "packed-invariant", "same"),
        ({"tiled": 3, "packed": 1, "packed-invariant": 1.5}, "packed-invariant", "packed"),
        ({"tiled": 0.5, "packed": 1, "packed-invariant": 1}, "tiled", "same"),
        ({"tiled": 1.5, "packed": 1, "packed-invariant": 2}, "tiled", "packed"),
        # Where nothing is clear, the likelier one is taken.
        ({"tiled": 1, "packed": 1, "packed-invariant": 0.97}, "packed-invariant", "same"),
        ({"tiled": 2, "packed": 1, "packed-invariant": 1.05}, "packed-invariant", "same"),
        ({"tiled": 2, "packed": 1, "packed-invariant": 1.06}, "packed-invariant", "packed"),
    ],
)
def test_the_fastest_layout_is_chosen_unless_an_invariant_one_is_as_fast(
    seconds: dict[str, float],
    invariant: str,
    wanted: str,
    tmp_path: Path,
    new_probe: Callable[..., Probe],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        Probe, "_layout_ratio", lambda *args: seconds[args[4].name] / seconds[args[3].name]
    )
    for _ in range(2):  # The second one may know the answers.
        probe = new_probe(tmp_path, kernel=KERNEL)
        assert probe.invariant(64, 128).name == invariant
        found = probe.plan(64, 128)
        assert found.choice == (invariant if wanted == "same" else wanted)
        assert found.ratio == pytest.approx(seconds[invariant] / seconds["packed"], abs=1e-3)
        fastest = probe.fastest(64, 128)
        assert fastest is not None
        assert fastest.name == "packed"


@needs_kernel
def test_an_answer_about_other_layouts_is_tried_again(
    tmp_path: Path, new_probe: Callable[..., Probe], rounds: list[float]
):
    rounds += [3.0] * 3
    assert new_probe(tmp_path).plan(64, 128).choice == "plain"
    rounds += [0.5] * 6
    assert new_probe(tmp_path, kernel=KERNEL).plan(64, 128).choice == "packed-invariant"
    assert rounds == []


@pytest.mark.parametrize(
    ("ratios", "wanted", "is_kept"),
    [
        ([0.8, 0.9, 0.85], 32, True),
        ([1.2, 1.1, 1.0], 64, True),
        ([0.8, 0.9, 0.95], 64, False),  # within the margin
        ([0.8, 0.8, 1.5], 64, False),  # another program was busy
    ],
)
def test_a_width_is_chosen_if_it_is_clearly_faster(
    ratios: list[float],
    wanted: int,
    is_kept: bool,
    tmp_path: Path,
    new_probe: Callable[..., Probe],
    monkeypatch: pytest.MonkeyPatch,
):
    rounds = list(ratios)
    monkeypatch.setattr(Probe, "_width_ratio", lambda probe, num_inputs, width: rounds.pop(0))
    probe = new_probe(tmp_path)
    assert probe.width(576) == wanted
    assert rounds == []
    assert probe.width(576) == wanted  # not tried again by the same process
    assert len(list(tmp_path.iterdir())) == is_kept
    if is_kept:
        assert new_probe(tmp_path).width(576) == wanted
    assert probe.answers.odd_ones() == []  # A width is no plan.


def test_a_width_that_changes_bits_is_not_tried(
    new_probe: Callable[..., Probe], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Geometry, "is_possible", lambda geometry, num_inputs, width: False)
    monkeypatch.setattr(Probe, "_width_ratio", lambda probe, num_inputs, width: 0.5)
    assert new_probe().width(576) == 64


def test_a_round_compares_both_widths(
    new_probe: Callable[..., Probe], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Probe, "_width_ratio", WIDTH_RATIO)
    monkeypatch.setattr(probe_module, "_fastest", FASTEST)
    assert new_probe().width(576) in (32, 64)


def test_shapes_whose_plan_differs_from_the_rest_are_listed(tmp_path: Path):
    answers = PlanAnswers(tmp_path, "here")
    assert answers.odd_ones() == []
    for shape, plan in [("a", "tiled"), ("b", "plain"), ("c", "tiled"), ("d", "tiled")]:
        answers.put(shape, plan, 1.5, date(2026, 11, 22))
    PlanAnswers(tmp_path, "there").put("e", "plain", 1.5, date(2026, 11, 22))
    assert [each.shape for each in answers.odd_ones()] == ["b"]
    assert PlanAnswers(None, "here").odd_ones() == []


def test_an_unwritable_folder_is_tolerated(
    tmp_path: Path, new_probe: Callable[..., Probe], rounds: list[float]
):
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "missing", tmp_path / "file"):
        rounds += [3.0] * 3
        assert new_probe(folder).plan(64, 128).choice == "plain"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_the_fastest_of_several_runs_counts():
    seconds = iter([0, 1, 5, 4, 3, 6])  # in turns; the first ones do not count
    now = 0.0

    def apply(x: np.ndarray, residual: None) -> None:
        nonlocal now
        now += next(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module.time, "perf_counter", lambda: now)
        assert FASTEST((apply, apply), np.ones((1, 1))) == [3, 4]


def test_the_machine_key_has_cpu_blas_numpy_and_threads():
    key = machine_key(Blas(), 2)
    assert key != machine_key(Blas(), 3)
    for part in (Blas().core, Blas().version, np.__version__):
        assert part in key


def test_a_backend_asks_the_probe_unless_a_plan_is_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_backend, "numpy_kernel", lambda: None)
    monkeypatch.setattr(Probe, "plan", lambda self, *shape: Found("tiled", 0.5))
    for plan, wanted in (("auto", "tiled"), ("plain", "plain")):
        backend = load_backend("numpy", config=EngineConfig(linear_plan=plan))
        backend.load_linear((70, 9), [np.ones((70, 9), np.float32)])
        assert backend.linear_plans == {(9, 70): wanted}
