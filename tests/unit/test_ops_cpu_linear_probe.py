"""The probe that chooses a plan, and what it remembers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mie.backend import load_backend
from mie.config import EngineConfig
from mie.ops_cpu import probe as probe_module
from mie.ops_cpu.blas import Blas
from mie.ops_cpu.linear_plain import PlainPlan
from mie.ops_cpu.linear_tiled import TiledPlan
from mie.ops_cpu.probe import Probe, cache_path, machine_key, read_answers, write_answers
from mie.ops_cpu.workers import Workers


@pytest.fixture
def new_probe() -> Iterator[Callable[..., Probe]]:
    workers = Workers(1)
    plans = (PlainPlan(np.dtype("float32"), workers), TiledPlan(np.dtype("float32"), workers))
    yield lambda path=None, machine="here": Probe(*plans, machine, path)
    workers.close()


@pytest.mark.parametrize(
    ("tiled_by_plain", "wanted"), [(0.5, "tiled"), (1.04, "tiled"), (1.06, "plain"), (3, "plain")]
)
def test_tiled_may_be_a_little_slower(
    tiled_by_plain: float,
    wanted: str,
    new_probe: Callable[..., Probe],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(probe_module, "_fastest", lambda applies, x: [1.0, tiled_by_plain])
    assert new_probe().choose(64, 128) == wanted


def test_the_fastest_of_several_counts():
    seconds = iter([0, 1, 3, 2, 5, 4, 6, 8, 7, 9])  # in turns; the first ones do not count
    now = 0.0

    def apply(x: np.ndarray, residual: None) -> None:
        nonlocal now
        now += next(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module.time, "perf_counter", lambda: now)
        assert probe_module._fastest((apply, apply), np.ones((1, 1))) == [3, 2]


def test_an_answer_is_remembered_for_its_machine_and_shape(
    tmp_path: Path, new_probe: Callable[..., Probe], monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "mie" / "plans.json"
    answer = new_probe(path).choose(64, 128)
    assert json.loads(path.read_text()) == {"here": {"float32 64x128": answer}}
    other = "plain" if answer == "tiled" else "tiled"
    write_answers(path, "here", {"float32 64x128": other})
    assert new_probe(path).choose(64, 128) == other
    monkeypatch.setattr(Probe, "_try", lambda self, num_inputs, num_outputs: "tried")
    assert new_probe(path, machine="there").choose(64, 128) == "tried"
    assert new_probe(path).choose(128, 64) == "tried"
    assert read_answers(path)["here"]["float32 64x128"] == other
    assert [each.name for each in path.parent.iterdir()] == ["plans.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "\xff", '{"here": 3}', '{"here": {"float32 64x128": "fast"}}']
)
def test_a_cache_that_is_not_ours_is_no_cache(
    text: str, tmp_path: Path, new_probe: Callable[..., Probe]
):
    path = tmp_path / "plans.json"
    path.write_text(text, encoding="latin-1")
    answer = new_probe(path).choose(64, 128)
    assert read_answers(path) == {"here": {"float32 64x128": answer}}


def test_a_cache_that_cannot_be_written_is_no_problem(
    tmp_path: Path, new_probe: Callable[..., Probe]
):
    (tmp_path / "file").write_text("")
    assert new_probe(tmp_path / "file" / "plans.json").choose(64, 128) in ("plain", "tiled")
    (tmp_path / "plans.json").mkdir()
    assert new_probe(tmp_path / "plans.json").choose(64, 128) in ("plain", "tiled")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "plans.json"]


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch):
    assert cache_path({"XDG_CACHE_HOME": "/there"}) == Path("/there/mie/linear_plans.json")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    wanted = Path("/home/me/.cache/mie/linear_plans.json")
    assert cache_path({"XDG_CACHE_HOME": "not/absolute"}) == cache_path({}) == wanted

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_path({}) is None


def test_another_cpu_blas_numpy_or_number_of_threads_is_another_machine():
    key = machine_key(Blas(), 2)
    assert key != machine_key(Blas(), 3)
    for part in (Blas().core, Blas().version, np.__version__):
        assert part in key


def test_a_backend_asks_the_probe_unless_it_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Probe, "choose", lambda self, num_inputs, num_outputs: "tiled")
    for plan, wanted in (("auto", "tiled"), ("plain", "plain")):
        backend = load_backend("numpy", config=EngineConfig(linear_plan=plan))
        backend.load_linear((70, 9), [np.ones((70, 9), np.float32)])
        assert backend.linear_plans == {(9, 70): wanted}
