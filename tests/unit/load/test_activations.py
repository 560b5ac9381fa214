"""Test the setting ``activations``: its products, its refusals, and where its value is stated."""

import io
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from quantised_rows import FORMS, columns, in_blocks, quantised
from tiny_models import LLAMA, QWEN3_TIED, random_weights, write_model

from mie import SamplingParams
from mie.checkpoint.config import load_model_config
from mie.config.engine import EngineConfig
from mie.disk.identity import Identity
from mie.disk.store import BlockStore
from mie.engine.engine import Engine
from mie.errors import ConfigError
from mie.load.backends import load_backend
from mie.load.engine import load_engine
from mie.load.opened import check_has_integers
from mie.load.settings import LoadSettings
from mie.ops.backend import Backend
from mie.ops.weights.integer import integer_linear
from mie.ops.weights.quantised import Form, dequantise

INT8 = EngineConfig(activations="int8")
QUANTISED = Path(__file__).parents[2] / "data" / "quantised"


def numpy_backend(**settings: Any) -> Backend:
    return load_backend("numpy", config=EngineConfig(activations="int8", **settings))


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_backend_numpy_computes_the_defined_product(form: Form, is_invariant: bool):
    """Weights of fp8 have the product of floats."""
    rows = quantised(form, 150, columns(form, 2 * form.group + 9))
    rng = np.random.default_rng(2)
    x, bias, residual = (
        rng.normal(size=shape).astype(np.float32) for shape in ((7, rows.shape[1]), 150, (7, 150))
    )
    backend = numpy_backend(batch_invariant=is_invariant)
    matrix = backend.load_linear(rows.shape, in_blocks(rows, 40), bias, [(150, form)])
    got = backend.linear(x, matrix, residual)
    if form.codes == "float8_e4m3fn":
        floats = load_backend("numpy", config=EngineConfig(batch_invariant=is_invariant))
        matrix = floats.load_linear(rows.shape, in_blocks(rows, 40), bias, [(150, form)])
        np.testing.assert_array_equal(got, floats.linear(x, matrix, residual))
    else:
        np.testing.assert_array_equal(got, integer_linear(x, rows, bias, residual))


def test_only_integer_parts_of_a_matrix_round_activations():
    int4, int8 = FORMS[3], FORMS[8]
    q, v = quantised(int4, 70, 65, seed=1), quantised(int8, 30, 65, seed=2)
    rng = np.random.default_rng(3)
    k, x = (rng.normal(size=shape).astype(np.float32) for shape in ((30, 65), (5, 65)))
    backend = numpy_backend()
    parts = [(70, int4), (30, None), (30, int8)]
    matrix = backend.load_linear(
        (130, 65), chain(in_blocks(q, 40), [k], in_blocks(v, 20)), None, parts
    )
    got = backend.linear(x, matrix)
    np.testing.assert_array_equal(got[:, :70], integer_linear(x, q))
    np.testing.assert_array_equal(got[:, 70:100], x @ k.T)
    np.testing.assert_array_equal(got[:, 100:], integer_linear(x, v))


def test_an_embedding_is_exact_and_a_head_that_shares_it_rounds_activations():
    rows = quantised(FORMS[8], 90, 65)
    backend = numpy_backend()
    table = backend.load_embedding(rows.shape, in_blocks(rows, 40), rows.form)
    token_ids = np.array([3, 89, 3])
    np.testing.assert_array_equal(backend.embed(token_ids, table), dequantise(rows)[token_ids])
    x = np.random.default_rng(4).normal(size=(3, 65)).astype(np.float32)
    got = backend.linear(x, backend.tie_linear(table))
    np.testing.assert_array_equal(got, integer_linear(x, rows))


@needs_compiler
def test_the_emulated_backend_states_the_setting():
    """tests/kernels/test_integer_products.py has the products."""
    assert load_backend("cupy-emulated", config=INT8).numerics()["activations"] == "int8"


def test_float64_refuses_the_setting():
    with pytest.raises(ConfigError, match="activations 'int8' contradicts dtype 'float64'"):
        load_backend("numpy", "float64", INT8)


def new_engine(directory: Path, **settings: Any) -> Engine:
    names = ("quantization", "head_dtype")
    own = {name: settings.pop(name) for name in names if name in settings}
    config = EngineConfig(num_blocks=8, max_model_len=32, **settings)
    return load_engine(directory, LoadSettings(engine=config, backend="numpy", **own))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models in floats with and without a head of their own."""
    base = tmp_path_factory.mktemp("models")
    configs = {"own head": LLAMA, "tied": QWEN3_TIED}
    return {n: write_model(base / n, c, random_weights(c)) for n, c in configs.items()}


def test_a_model_needs_a_product_with_integers(models: dict[str, Path]):
    """An embedding of int8 is looked up. As a tied head, it is a factor too."""
    message = r"the model has no matrix of int4 or int8.*\(add quantization='int8' or 'int4'"
    for name in models:
        with pytest.raises(ConfigError, match=message):
            new_engine(models[name], activations="int8")
    new_engine(models["tied"], activations="int8", head_dtype="int8")
    forms = {"model.embed_tokens.weight": FORMS[8]}
    check_has_integers(forms, load_model_config(models["tied"]))
    with pytest.raises(ConfigError, match=message):
        check_has_integers(forms, load_model_config(models["own head"]))


def test_weights_of_fp8_alone_are_no_integers():
    with pytest.raises(ConfigError, match="the model has no matrix of int4 or int8"):
        new_engine(QUANTISED / "fp8_channel", activations="int8")
    new_engine(QUANTISED / "w4_group", activations="int8")


def test_the_event_log_states_the_setting(models: dict[str, Path]):
    for name in ("float32", "int8"):
        trace = io.StringIO()
        config = EngineConfig(num_blocks=8, max_model_len=32, activations=name)
        settings = LoadSettings(engine=config, backend="numpy", quantization="int4")
        engine = load_engine(models["tied"], settings, trace=trace)
        engine.add_request([1, 2], SamplingParams(max_tokens=1))
        while engine.has_work:
            engine.step()
        snapshot = json.loads(trace.getvalue().splitlines()[0])
        assert snapshot["numerics"]["activations"] == name


def test_blocks_on_a_disk_of_both_modes_never_mix(models: dict[str, Path], tmp_path: Path):
    """The identity differs even if a backend's own facts do not."""
    found: list[Identity] = []

    def note(identity: Identity) -> BlockStore:
        found.append(identity)
        return BlockStore(tmp_path, identity, max_bytes=1 << 20, model={"model": "m"})

    for name in ("float32", "int8"):
        config = EngineConfig(num_blocks=8, max_model_len=32, activations=name)
        settings = LoadSettings(engine=config, backend="numpy", quantization="int4")
        load_engine(models["tied"], settings, new_store=note)
    assert [each.activations for each in found] == ["float32", "int8"]
    assert found[0].digest != found[1].digest
    assert found[0].root(None) != found[1].root(None)
