"""Compare frequencies and tables of RoPE with the sources of the formulas and with transformers."""

import cmath
import hashlib
import json
import math
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from mie.checkpoint.config import load_model_config, model_config_from_hf
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.model.config import RopeConfig
from mie.model.rope import rope_inv_freq
from mie.ops.numpy_backend import NumpyBackend
from mie.ops.rope import rope_table

GOLDEN = sorted((Path(__file__).parents[2] / "golden" / "models").iterdir())
HEAD_DIM = 16
DTYPES = ("float32", "float64")

TWO_PI = Fraction("6.28318530717958647692528676655900576839433879875021164194988918461563281257242")
LLAMA3 = RopeConfig(
    rope_type="llama3", theta=500.0, factor=8.0, original_max_position_embeddings=64
)
YARN = RopeConfig(rope_type="yarn", theta=1e4, factor=8.0, original_max_position_embeddings=512)


def plain(theta: float) -> np.ndarray:
    return np.array([theta ** (-2 * j / HEAD_DIM) for j in range(HEAD_DIM // 2)])


@pytest.mark.parametrize("directory", GOLDEN, ids=lambda directory: directory.name)
def test_frequencies_equal_those_of_transformers(directory: Path) -> None:
    config = load_model_config(directory)
    golden = np.load(directory / "golden.npz")
    if config.rope is None:
        assert "rope.inv_freq" not in golden
        return
    inv_freq, scaling = rope_inv_freq(config.rope, config.head_dim, config.max_position_embeddings)
    assert inv_freq.dtype == np.float64
    np.testing.assert_allclose(inv_freq, golden["rope.inv_freq"], rtol=1e-6)
    assert scaling == pytest.approx(float(golden["rope.attention_scaling"]), rel=1e-12)


def test_the_golden_models_cover_every_kind_of_scaling() -> None:
    configs = [model_config_from_hf(json.loads((d / "config.json").read_text())) for d in GOLDEN]
    types = {c.rope.rope_type for c in configs if c.rope is not None}
    assert types == {"default", "linear", "llama3", "yarn", "longrope"}


def test_yarn_without_truncation_ramps_between_fractions_of_pairs() -> None:
    rope = RopeConfig(**{**vars(YARN), "truncate": False})
    inv_freq, _ = rope_inv_freq(rope, HEAD_DIM, 99)
    first, last = (
        HEAD_DIM * math.log(512 / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (32, 1)
    )
    assert 0 < first < 1 < 3 < last < 4
    slowed = np.clip((np.arange(8) - first) / (last - first), 0, 1)
    np.testing.assert_allclose(inv_freq, plain(1e4) * (slowed / 8 + 1 - slowed), rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({}, 0.1 * math.log(8) + 1),
        ({"factor": 1.0}, 1.0),
        ({"factor": 0.5}, 1.0),
        ({"attention_factor": 1.5}, 1.5),
        (
            {"mscale": 2.0, "mscale_all_dim": 0.5},
            (0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1),
        ),
        ({"mscale": 2.0}, 0.1 * math.log(8) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 0.0}, 0.1 * math.log(8) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 0.5, "attention_factor": 1.1}, 1.1),
    ],
)
def test_yarn_attention_scaling(changes: dict[str, float], scaling: float) -> None:
    rope = RopeConfig(**{**vars(YARN), **changes})
    assert rope_inv_freq(rope, HEAD_DIM, 99)[1] == pytest.approx(scaling, rel=1e-12)


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=lambda rope: rope.rope_type)
def test_max_position_embeddings_replaces_a_missing_original_context(rope: RopeConfig) -> None:
    absent = RopeConfig(**{**vars(rope), "original_max_position_embeddings": None})
    original = rope.original_max_position_embeddings
    assert original is not None
    wanted, _ = rope_inv_freq(rope, HEAD_DIM, 7)
    np.testing.assert_array_equal(rope_inv_freq(absent, HEAD_DIM, original)[0], wanted)
    assert not np.array_equal(rope_inv_freq(absent, HEAD_DIM, 3 * original)[0], wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_positions", [1, 4095, 4096, 4097, 9000])
def test_the_table_has_the_cosine_and_sine_of_every_position(num_positions: int, dtype: str):
    inv_freq = plain(1e4)[:4]
    table = rope_table(inv_freq, 1.0, num_positions, dtype)
    assert table.shape == (num_positions, 2, 4)
    assert table.dtype == dtype
    angles = np.arange(num_positions)[:, None] * inv_freq
    error = 2.5e-16 if dtype == "float64" else 0
    np.testing.assert_allclose(table[:, 0], np.cos(angles).astype(dtype), rtol=0, atol=error)
    np.testing.assert_allclose(table[:, 1], np.sin(angles).astype(dtype), rtol=0, atol=error)


def test_far_positions_are_exact():
    """The angle is reduced with 78 digits of 2 pi here; float32 angles would be off by 0.002."""
    inv_freq = plain(1e4)
    tables = {dtype: rope_table(inv_freq, 1.0, 100_001, dtype) for dtype in DTYPES}
    for position in (65_537, 99_999, 100_000):
        for j, frequency in enumerate(inv_freq.tolist()):
            angle = float((Fraction(frequency) * position) % TWO_PI)
            wanted = cmath.rect(1.0, angle)
            assert abs(complex(*tables["float64"][position, :, j]) - wanted) < 1e-10
            assert abs(complex(*tables["float32"][position, :, j]) - wanted) < 1e-7


@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 64), (1e4, 96), (5e5, 128), (1e6, 256)])
def test_plain_frequencies_are_the_nearest_floats(theta: float, head_dim: int):
    exact = Context(prec=50)
    rope = RopeConfig(rope_type="default", theta=theta)
    inv_freq, _ = rope_inv_freq(rope, head_dim, 99)
    for j, got in enumerate(inv_freq.tolist()):
        exponent = exact.divide(Decimal(-2 * j), Decimal(head_dim))
        assert got == float(exact.exp(exact.multiply(exponent, exact.ln(Decimal(theta)))))


@pytest.mark.parametrize(
    ("dtype", "digest"), [("float32", "caf7b6361bdbfdf7"), ("float64", "190bd884bab34873")]
)
def test_every_machine_gives_the_same_table(dtype: str, digest: str):
    """NumPy's cosines differ by the CPU in float64, and its powers move the frequencies."""
    found = hashlib.sha256()
    for rope in (RopeConfig(rope_type="default", theta=1e4), LLAMA3, YARN):
        inv_freq, scaling = rope_inv_freq(rope, 64, 4096)
        found.update(rope_table(inv_freq, scaling, 4096, dtype).tobytes())
    assert found.hexdigest()[:16] == digest


def test_layers_with_equal_rotations_load_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded = []

    def count(backend: NumpyBackend, *arguments: Any) -> Any:
        loaded.append(arguments)
        return load_rope(backend, *arguments)

    load_rope = NumpyBackend.load_rope
    monkeypatch.setattr(NumpyBackend, "load_rope", count)
    config = tiny_models.LLAMA | {"num_hidden_layers": 3}
    model = tiny_models.write_model(tmp_path, config, tiny_models.random_weights(config))
    load_engine(model, LoadSettings(backend="numpy"), use_tqdm=False)
    assert len(loaded) == 1
