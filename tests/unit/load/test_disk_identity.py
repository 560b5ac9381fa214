"""Test that blocks of another model or of other settings are never read."""

import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from audit import tier_of
from engines import run_to_end

from mie import SamplingParams
from mie.config.engine import EngineConfig
from mie.disk.identity import Identity
from mie.load import disk
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops.numpy_backend import NumpyBackend

GOLDEN = Path(__file__).parents[2] / "golden" / "models" / "qwen3_tied"
PROMPT = [*range(5, 25)]


def num_cached(model: Path, folder: Path, backend: str = "numpy", **settings: Any) -> int:
    """Return the prompt's tokens that a fresh engine finds in the folder. It writes the others."""
    settings = {"num_blocks": 40, "block_size": 4, "max_model_len": 32, **settings}
    config = EngineConfig(prefix_cache_dir=str(folder), **settings)
    loaded = LoadSettings(engine=config, backend=backend)
    engine = load_engine(model, loaded, use_tqdm=False)
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
    run_to_end(engine)
    tier_of(engine).close()
    return request.metrics.num_cached_tokens


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "model"))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """Return a folder with the blocks of the model."""
    path = tmp_path / "cache"
    assert num_cached(model, path) == 0
    assert num_cached(model, path) == 16
    return path


def change_a_weight(model: Path) -> None:
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)  # in place, with the same size and inode


def change_the_configuration(model: Path) -> None:
    path = model / "config.json"
    text = path.read_text()
    assert '"rope_theta": 10000' in text
    path.write_text(text.replace('"rope_theta": 10000', '"rope_theta": 20000', 1))


@pytest.mark.parametrize("change", [change_a_weight, change_the_configuration])
def test_another_model_finds_nothing(model: Path, folder: Path, change: Callable[[Path], None]):
    change(model)
    assert num_cached(model, folder) == 0


@pytest.mark.parametrize("settings", [{"block_size": 8}, {"kv_cache_dtype": "int4"}])
def test_another_setting_finds_nothing(model: Path, folder: Path, settings: dict[str, Any]):
    assert num_cached(model, folder, **settings) == 0


def test_other_numerics_find_nothing(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    facts = NumpyBackend.numerics
    monkeypatch.setattr(NumpyBackend, "numerics", lambda self: {**facts(self), "blas": "another"})
    assert num_cached(model, folder) == 0


def test_another_version_finds_nothing(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "__version__", "another")
    assert num_cached(model, folder) == 0


@pytest.mark.parametrize("name", [field.name for field in fields(Identity)])
def test_each_fact_changes_the_keys(name: str):
    facts: dict[str, Any] = {
        field.name: 1 if field.type == "int" else "a" for field in fields(Identity)
    }
    identity = Identity(**facts)
    other = replace(identity, **{name: facts[name] * 2})
    assert identity.digest != other.digest
    assert identity.root(None) != other.root(None)
