"""Test the whole engine on the compiled backend: the tokens of NumPy, and odd uses of backends.

The bundled model's best logit leads by far more than rounding errors, so tokens are compared
although both sides compute in float32.
"""

import gc
import sys
import textwrap
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_jit_bits as bits
from compiled import jit_backend, needs_numba
from deadlines import join, run
from small_pool import PROMPT, check_small_pool, stories
from test_jit_bits import Model, Sequences, Stepper, models

from mie import LLM, SamplingParams, StructuredOutputsParams
from mie.config.engine import EngineConfig
from mie.load.backends import load_backend
from mie.ops.backend import KVCacheShape

pytestmark = needs_numba

__all__ = ["models"]  # a fixture

SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_threads": 1},
    {"num_threads": 4},
    {"enforce_eager": True},
    {"block_size": 4},
    {"async_scheduling": True},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "fp8", "block_size": 4},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    {"weight_dtype": "bfloat16"},
    {"weight_dtype": "bfloat16", "kv_cache_dtype": "int8"},
    {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    {"kv_cache_dtype": "int4"},
]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(each, marks=[pytest.mark.slow] if i % 3 else [])
        for i, each in enumerate(SETTINGS)
    ],
    ids=str,
)
def test_the_engine_gives_the_tokens_of_numpy(settings: dict[str, Any]):
    tokens, llm = stories("jit", **settings)
    of_numpy = {name: value for name, value in settings.items() if name != "enforce_eager"}
    wanted, _ = stories("numpy", **of_numpy)
    assert tokens == wanted
    if settings.get("max_num_seqs") != 1:
        check_small_pool(llm)


def test_constraints_and_scores_are_those_of_numpy():
    """Structured masks, banned words, penalties, and the log-probabilities of prompts."""
    requests = [
        SamplingParams(
            temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex=regex)
        )
        for regex in ("(owl|fox|bell), [a-z]{3,8}", "[0-9]{2,4}")
    ]
    requests += [
        SamplingParams(temperature=1.0, seed=1, max_tokens=8, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0, max_tokens=8, bad_words=["the", "was"], logprobs=0),
        SamplingParams(temperature=0.8, seed=2, max_tokens=8, repetition_penalty=1.3, min_p=0.05),
        SamplingParams(temperature=0, max_tokens=8, logit_bias={7: 5.0}, presence_penalty=0.5),
    ]
    pytest.importorskip("llguidance", reason="structured outputs need llguidance")
    outputs = {
        backend: LLM("bundled", backend=backend, num_blocks=64, max_num_batched_tokens=11).generate(
            [PROMPT] * len(requests), requests, use_tqdm=False
        )
        for backend in ("jit", "numpy")
    }
    for mine, theirs in zip(outputs["jit"], outputs["numpy"], strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        for own, other in (
            (mine.prompt_logprobs, theirs.prompt_logprobs),
            (mine.outputs[0].logprobs, theirs.outputs[0].logprobs),
        ):
            for row, wanted in zip(own or [], other or [], strict=True):
                assert (row is None) == (wanted is None)
                for token_id, found in (row or {}).items():
                    assert abs(found.logprob - wanted[token_id].logprob) < 1e-4


# Steps.


def new_stepper(model: Model, backend: Any, num_blocks: int = 40) -> Stepper:
    config = model.on(backend).config
    shape = KVCacheShape(
        num_layers=config.num_layers, num_blocks=num_blocks, block_size=16,
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
    )  # fmt: skip
    return Stepper(model.on(backend), backend.new_kv_cache(shape))


def sequences(seed: int, *lengths: int) -> Sequences:
    rng = np.random.default_rng(seed)
    token_ids = [rng.integers(0, 39, length) for length in lengths]
    return bits.sequences_in(rng, token_ids, 16)[0]


def test_a_step_without_logits(models: dict[tuple[str, str], Model]):
    """A chunk that samples nothing can be the first step, or come between others."""
    for is_eager in (False, True):
        backend = load_backend("jit", config=EngineConfig(enforce_eager=is_eager, num_threads=2))
        stepper = new_stepper(models["llama", "float32"], backend)
        asked = sequences(0, 30)
        nothing = replace(asked.batch([(0, 0, 10)]), logits_rows=np.array([], np.int64))
        assert stepper.step(nothing).shape == (0, 40)
        middle = stepper.step(asked.batch([(0, 10, 20)]))
        again = replace(asked.batch([(0, 20, 25)]), logits_rows=np.array([], np.int64))
        assert stepper.step(again).shape == (0, 40)
        last = stepper.step(asked.batch([(0, 25, 30)]))
        whole = new_stepper(models["llama", "float32"], backend).step(asked.batch([(0, 0, 30)]))
        assert middle.tobytes() == whole[10:20].tobytes()
        assert last.tobytes() == whole[25:].tobytes()


def test_rows_of_logits_can_repeat_and_come_in_any_order(models: dict[tuple[str, str], Model]):
    stepper = new_stepper(models["odd sizes", "bfloat16"], jit_backend())
    batch = sequences(1, 20, 3).batch([(0, 0, 20), (1, 0, 3)])
    whole = stepper.step(batch)
    rows = np.array([22, 0, 0, 5, 22, 19, *[7] * 100])
    assert stepper.step(replace(batch, logits_rows=rows)).tobytes() == whole[rows].tobytes()


def test_steps_alternate_in_size(models: dict[tuple[str, str], Model]):
    """Buffers grow for a large step, and small ones follow and precede it."""
    for name in ("llama", "wide group"):
        stepper = new_stepper(models[name, "float32"], jit_backend(3))
        asked = sequences(2, 1, 200, 70, 64)
        batches = [
            asked.batch(pieces)
            for pieces in ([(0, 0, 1)], [(1, 0, 200)], [(2, 0, 63)], [(3, 0, 64), (2, 0, 70)])
        ]
        wanted = [stepper.step(batch).tobytes() for batch in batches]
        for index in (1, 0, 3, 0, 2, 1, 1, 0):
            assert stepper.step(batches[index]).tobytes() == wanted[index]


def test_tokens_that_a_launched_step_draws(models: dict[tuple[str, str], Model]):
    stepper = new_stepper(models["llama", "float32"], jit_backend())
    batch = sequences(3, 1, 1, 1).batch([(0, 0, 1), (1, 0, 1), (2, 0, 1)])
    wanted = stepper.step(replace(batch, token_ids=np.array([7, 5, 5])))
    got = stepper.step(replace(batch, drawn=[5, 7], drawn_rows=np.array([1, 0, 0])))
    assert got.tobytes() == wanted.tobytes()


def test_two_models_and_functions_share_a_backend(models: dict[tuple[str, str], Model]):
    """They have other heads, and more partial results than the other's."""
    backend = load_backend("jit", config=EngineConfig(num_threads=2))
    asked = sequences(4, 600, 12)
    first, second = (
        new_stepper(models[name, "float32"], backend, 60) for name in ("llama", "wide group")
    )
    plain = [lambda batch, each=each: each.forward(batch) for each in (first, second)]
    parts = [[(0, 0, 590), (1, 0, 8)], [(0, 590, 591), (1, 8, 12)], [(0, 591, 592)]]
    wanted = [
        [new.step(asked.batch(pieces)).tobytes() for pieces in parts]
        for new in (
            new_stepper(models[name, "float32"], jit_backend(), 60)
            for name in ("llama", "wide group")
        )
    ]
    for _ in range(2):
        for index, pieces in enumerate(parts):
            batch = asked.batch(pieces)
            assert first.step(batch).tobytes() == wanted[0][index]
            assert second.step(batch).tobytes() == wanted[1][index]
            for number, forward in enumerate(plain):
                got = np.array(backend.run_step(forward, batch))
                assert got.tobytes() == wanted[number][index]


def test_operators_between_steps_change_no_later_step(models: dict[tuple[str, str], Model]):
    """An operator of another model runs at once, and the first model's program is replayed."""
    backend = load_backend("jit", config=EngineConfig(num_threads=2))
    asked = sequences(5, 600, 9)
    stepper, other = (
        new_stepper(models[name, "float32"], backend, 60) for name in ("wide group", "llama")
    )
    stepper.step(asked.batch([(0, 0, 599), (1, 0, 8)]))
    batch = asked.batch([(0, 599, 600), (1, 8, 9)])
    wanted = stepper.step(batch)
    for _ in range(3):
        other.forward(batch)
        assert stepper.step(batch).tobytes() == wanted.tobytes()


def test_a_forward_pass_that_raises_leaves_the_backend_usable(models: dict[tuple[str, str], Model]):
    backend = load_backend("jit", config=EngineConfig(num_threads=2))
    stepper = new_stepper(models["llama", "float32"], backend)
    batch = sequences(6, 20).batch([(0, 0, 20)])
    wanted = stepper.step(batch)

    def fail(given: Any) -> Any:
        backend.embed(given.token_ids, stepper.decoder._embedding)
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        backend.run_step(fail, batch)
    table = backend.load_embedding((4, 3), [np.eye(4, 3, dtype=np.float32)])
    assert backend.embed(np.array([2]), table).tolist() == [[0, 0, 1]]
    assert stepper.step(batch).tobytes() == wanted.tobytes()


def test_two_backends_run_at_once(models: dict[tuple[str, str], Model]):
    """Two threads replay programs of their own, whose workers compete for the CPUs."""
    asked = sequences(8, 70, 9, 1)
    batches = [asked.batch([(0, 0, 69), (1, 0, 9)]), asked.batch([(0, 69, 70), (2, 0, 1)])]
    backends = [load_backend("jit", config=EngineConfig(num_threads=3)) for _ in range(2)]
    names = ("llama", "odd sizes")
    wanted = [
        [alone.step(batch).tobytes() for batch in batches]
        for alone in (new_stepper(models[name, "float32"], jit_backend()) for name in names)
    ]
    found: list[list[bytes]] = [[], []]

    def replay(number: int) -> None:
        stepper = new_stepper(models[names[number], "float32"], backends[number])
        for _ in range(200):
            found[number] += [stepper.step(batch).tobytes() for batch in batches]

    threads = [threading.Thread(target=replay, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    join(*threads)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == theirs * 200


def test_a_model_can_be_deleted_while_its_backend_lives(models: dict[tuple[str, str], Model]):
    backend = load_backend("jit", config=EngineConfig(num_threads=2))
    batch = sequences(7, 20).batch([(0, 0, 20)])
    wanted = new_stepper(models["llama", "float32"], jit_backend()).step(batch)
    for _ in range(3):
        own = replace(models["llama", "float32"], decoders={})
        assert new_stepper(own, backend).step(batch).tobytes() == wanted.tobytes()
        del own
        gc.collect()


def test_backends_come_and_go():
    """Threads that are told to end still run the code of a backend that is deleted."""
    code = """
    import numpy as np
    from mie.config.engine import EngineConfig
    from mie.load.backends import load_backend

    x, matrix = np.ones((40, 30), np.float32), np.ones((70, 30), np.float32)
    for number in range(60):
        backend = load_backend("jit", config=EngineConfig(num_threads=number % 4 + 1))
        weight = backend.load_linear((70, 30), [matrix])
        for _ in range(number % 3):
            assert (backend.linear(x, weight) == 30).all()
        del backend
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = run(command)
    assert process.returncode == 0, process.stderr[-2000:]
