"""Check that an engine of several ranks gives the tokens of one rank, and survives interrupts."""

import numpy as np
import pytest
from adapter_files import random_adapter, write_peft
from audit import tier_of
from compiled import needs_numba
from disk_lives import GOLDEN
from engines import run_to_end
from rank_threads import ranks_as_threads
from small_pool import check_small_pool, stories
from tiny_models import CONFIGS, random_weights, write_model

from mie import LLM, LoRARequest, SamplingParams
from mie.config.engine import EngineConfig
from mie.errors import ConfigError, EngineDeadError, WorkerError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture
def ranks():
    with ranks_as_threads() as made:
        yield made


@pytest.mark.parametrize(
    "backend",
    [pytest.param("numpy", marks=pytest.mark.slow), pytest.param("jit", marks=needs_numba)],
)
@pytest.mark.usefixtures("ranks")
def test_ranks_share_copy_swap_and_preempt_as_one_engine_does(backend):
    expected, _ = stories(backend, num_threads=1)
    tokens, llm = stories(backend, num_threads=1, tensor_parallel_size=2)
    assert tokens == expected
    check_small_pool(llm)


def engine_of(directory, num_ranks, backend="numpy", **settings):
    config = EngineConfig(num_blocks=16, block_size=8, max_num_batched_tokens=16, **settings)
    settings = LoadSettings(engine=config, backend=backend, tensor_parallel_size=num_ranks)
    return load_engine(directory, settings)


def ask(engine):
    prompts = [[*range(5, 35), 6, 7], range(3, 9)]
    return [engine.add_request([*prompt], GREEDY) for prompt in prompts]


def answers(requests):
    return [(seq.output_ids, seq.logprobs) for each in requests for seq in each.sequences]


@pytest.mark.parametrize("number", [0, 3, 30])
def test_a_step_that_is_interrupted_anywhere_is_repeated(tiny, ranks, number):
    """Rank 0 is interrupted at one of its exchanges. The others give up the step with it."""
    engine = engine_of(tiny["llama"].directory, 2)
    expected = ask(engine)
    run_to_end(engine)
    again, own = ask(engine), ranks[0].exchange
    original, waits = own._await_others, iter(range(number))

    def interrupted(**options):
        if next(waits, None) is None:
            own._await_others = original
            raise KeyboardInterrupt
        original(**options)

    own._await_others = interrupted
    with pytest.raises(KeyboardInterrupt):
        run_to_end(engine)
    assert own._await_others is original
    run_to_end(engine)
    assert [tokens for tokens, _ in answers(again)] == [tokens for tokens, _ in answers(expected)]


def test_a_rank_that_fails_ends_the_engine_and_the_tokens_stay(tiny, ranks):
    engine = engine_of(tiny["llama"].directory, 2)
    requests = ask(engine)
    for _ in range(6):
        engine.step()
    kept = [list(tokens) for tokens, _ in answers(requests)]
    assert any(kept)
    ranks[0].error = MemoryError("for a test")
    for _ in range(2):
        with pytest.raises(WorkerError, match="a rank has ended: for a test"):
            engine.step()
    assert [tokens for tokens, _ in answers(requests)] == kept


def test_a_caller_gets_the_error_of_a_rank(ranks):
    llm = LLM("bundled", backend="numpy", num_blocks=16, tensor_parallel_size=2)
    ranks[0].error = MemoryError("for a test")
    with pytest.raises(EngineDeadError, match="WorkerError: a rank has ended: for a test"):
        llm.generate(["Once"], use_tqdm=False)


@pytest.mark.usefixtures("ranks")
def test_each_rank_has_its_part_of_the_memory(tiny):
    plans = {}
    for num_ranks in (1, 2):
        plans[num_ranks] = engine_of(tiny["llama"].directory, num_ranks).metrics.sizes
    assert plans[2]["mie:kv_bytes"] == plans[1]["mie:kv_bytes"]
    assert plans[2]["mie:weights_bytes"] < 1.1 * plans[1]["mie:weights_bytes"]


def test_heads_that_do_not_divide_are_refused(tiny):
    with pytest.raises(ConfigError, match="which 3 does not divide"):
        engine_of(tiny["llama"].directory, 3)


@needs_numba
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        pytest.param("gpt_oss", {"enforce_eager": True}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"async_scheduling": True}, marks=pytest.mark.slow),
        pytest.param("gemma3", {"num_threads": 2}, marks=pytest.mark.slow),
    ],
)
def test_jit_gives_the_bits_of_one_rank(tiny, name, settings):
    expected = ask(one := engine_of(tiny[name].directory, 1, "jit", num_threads=1))
    run_to_end(one)
    settings = {"num_threads": 1, **settings}
    given = ask(two := engine_of(tiny[name].directory, 2, "jit", **settings))
    run_to_end(two)
    assert answers(given) == answers(expected)
    assert np.isfinite(answers(given)[0][1][0].logprobs).all()


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("backend", ["numpy", pytest.param("jit", marks=needs_numba)])
def test_adapters_are_divided_with_their_matrices(tmp_path, backend):
    """Requests with and without adapters share steps. The matrices of queries have an order."""
    weights = random_weights(CONFIGS["qwen3_tied"])
    directory = write_model(tmp_path / "model", CONFIGS["qwen3_tied"], weights)
    loras = [
        LoRARequest(f"a{seed}", seed, str(write_peft(tmp_path / f"a{seed}", arrays)))
        for seed in (1, 2)
        for arrays in [random_adapter(weights, seed)]
    ]
    found = []
    for num_ranks in (1, 2):
        settings = {"enable_lora": True, "max_loras": 2, "num_threads": 1}
        engine = engine_of(directory, num_ranks, backend, **settings)
        slots = [engine.adapters.add(each, engine.adapters.read(each)).slot for each in loras]
        requests = []
        for slot in (0, *slots):
            labels = {"priority": 0, "cache_salt": str(slot), "client": None, "constraint": None}
            requests.append(engine.add([5, 6, 7], GREEDY, None, **labels, adapter=slot))
        run_to_end(engine)
        found.append(answers(requests))
    tokens = [[output_ids for output_ids, _ in each] for each in found]
    assert tokens[0] == tokens[1]
    assert len({*map(tuple, tokens[0])}) == 3, "adapters change the tokens"
    if backend == "jit":
        assert found[0] == found[1]


@needs_numba
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_tied",
        pytest.param("gemma3_two_ropes", marks=pytest.mark.slow),
        pytest.param("qwen35_delta", marks=pytest.mark.slow),
    ],
)
def test_ranks_keep_blocks_on_a_disk(tmp_path, name):
    """A block has the parts of all ranks. Another number of ranks does not find it."""

    def found(num_ranks, folder=tmp_path):
        sizes = {"block_size": 4, "num_blocks": 60, "num_threads": 1}
        config = EngineConfig(prefix_cache_dir=folder and str(folder), **sizes)
        settings = LoadSettings(engine=config, backend="jit", tensor_parallel_size=num_ranks)
        engine = load_engine(GOLDEN / name, settings)
        requests = ask(engine)
        run_to_end(engine)
        if folder is not None:
            tier_of(engine).close()
        return answers(requests), requests[0].metrics.num_disk_tokens

    expected, _ = found(1, None)
    assert found(2) == (expected, 0)
    given, num_tokens = found(2)
    assert given == expected
    assert num_tokens >= 28
    assert found(1) == (expected, 0)
