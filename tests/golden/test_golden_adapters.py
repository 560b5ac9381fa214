"""Compare logits with adapters with the logits of PEFT.

`scripts/make_adapters.py` made the random adapters, for tiny models of `tests/golden/models`.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from compiled import needs_numba
from emulated import needs_compiler
from numpy.typing import NDArray

from mie.checkpoint.adapters import read_adapter
from mie.checkpoint.config import load_model_config
from mie.checkpoint.weights import Checkpoint, expected_tensors
from mie.load.backends import load_backend
from mie.load.sizing import cache_shape
from mie.model.decoder import Decoder
from mie.model.layers.adapters import AdapterSlots, adapted_matrices
from mie.ops.backend import StepBatch

HERE = Path(__file__).parent
MODELS, ADAPTERS = HERE / "models", HERE / "adapters"
NAMES = sorted(path.name for path in ADAPTERS.iterdir())
TOLERANCE = 3e-5  # as without adapters
MAX_RANK = 8


def decoder_with_adapters(name: str, backend: str, dtype: str, paths: list[Path]) -> Decoder:
    """Return the decoder of a golden model with these adapters in its slots, from slot 1 on."""
    config, machine = load_model_config(MODELS / name), load_backend(backend, dtype)
    shapes = expected_tensors(config)
    slots = AdapterSlots(machine.adapters, config, len(paths), MAX_RANK)
    with Checkpoint.open(MODELS / name, shapes) as checkpoint:
        decoder = Decoder(config, machine, checkpoint, 192, adapters=slots)
    adapted = {each for matrix in adapted_matrices(config) for each in matrix}
    shapes = {each: shape for each, shape in shapes.items() if each in adapted}
    for slot, path in enumerate(paths, start=1):
        slots.put(slot, read_adapter(path, shapes, config, MAX_RANK).changes)
    return decoder


def logits_of(decoder: Decoder, token_ids: list[int], slots: list[int]) -> NDArray[np.floating]:
    """Return the logits [len(slots), T, V] of the same prompt with several adapters, in a step."""
    length, count = len(token_ids), len(slots)
    shape = cache_shape(decoder.config, count, length)
    states, recurrent = None, decoder.config.recurrent
    if recurrent is not None:
        num_layers = decoder.config.layers_recurrent.count(True)
        states = decoder.backend.recurrent.new_state_cache(recurrent.shape, num_layers, count)
    batch = StepBatch(
        token_ids=np.tile(token_ids, count),
        positions=np.tile(np.arange(length), count),
        slot_mapping=np.arange(count * length),
        cu_seqlens_q=np.arange(count + 1) * length,
        seq_lens=np.full(count, length),
        block_tables=np.arange(count)[:, None],
        logits_rows=np.arange(count * length),
        slots=np.arange(count),
        fresh=np.ones(count, bool),
        adapters=np.repeat(slots, length),
    )
    cache = decoder.backend.new_kv_cache(shape)
    logits = decoder.backend.run_step(lambda b: decoder.forward(b, cache, states), batch)
    return np.array(logits).reshape(count, length, -1)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("numpy", "float32"),
        ("numpy", "float64"),
        pytest.param("jit", "float32", marks=needs_numba),
        pytest.param("cupy-emulated", "float32", marks=[needs_compiler, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_peft(name: str, backend: str, dtype: str) -> None:
    """All adapters of a model, and the model without one, are rows of one step."""
    golden, wanted = np.load(MODELS / name / "golden.npz"), np.load(ADAPTERS / name / "golden.npz")
    paths = sorted((ADAPTERS / name).glob("*/"), key=lambda path: int(path.name))
    decoder = decoder_with_adapters(name, backend, dtype, paths)
    token_ids = [*golden["long.ids"].tolist(), *golden["long.greedy"].tolist()]
    each = {0: golden["long.logits"]}
    each |= {slot: wanted[f"{path.name}.logits"] for slot, path in enumerate(paths, start=1)}
    found = logits_of(decoder, token_ids, [*each])[:, golden["long.rows"]]
    for slot, logits in each.items():
        assert np.abs(found[slot] - logits).max() / np.abs(logits).max() < TOLERANCE, slot


@pytest.mark.parametrize("name", NAMES)
def test_every_set_of_adapters_has_a_provenance(name: str) -> None:
    provenance = json.loads((ADAPTERS / name / "provenance.json").read_text())
    assert provenance["script"] == "scripts/make_adapters.py"
    assert {"torch", "transformers", "peft"} <= provenance["versions"].keys()
    sizes = [path.stat().st_size for path in (ADAPTERS / name).rglob("*") if path.is_file()]
    assert max(sizes) < 50_000


@pytest.mark.parametrize("number", [0, 1])
def test_a_forgotten_scale_is_noticed(number: int) -> None:
    golden = np.load(MODELS / "llama31_gqa" / "golden.npz")
    path = ADAPTERS / "llama31_gqa" / str(number)
    decoder = decoder_with_adapters("llama31_gqa", "numpy", "float32", [path])
    assert decoder.adapters is not None
    config = decoder.config
    file = read_adapter(path, expected_tensors(config), config, MAX_RANK)
    plain = {name: dataclasses.replace(own, scale=1.0) for name, own in file.changes.items()}
    decoder.adapters.put(1, plain)
    token_ids = [*golden["long.ids"].tolist(), *golden["long.greedy"].tolist()]
    found = logits_of(decoder, token_ids, [1])[0, golden["long.rows"]]
    wanted = np.load(ADAPTERS / "llama31_gqa" / "golden.npz")[f"{number}.logits"]
    assert np.abs(found - wanted).max() / np.abs(wanted).max() > 100 * TOLERANCE
