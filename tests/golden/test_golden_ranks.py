"""Check that several ranks give the bits of one on a model of every family."""

from pathlib import Path

import numpy as np
import pytest
from compiled import needs_numba
from engines import run_to_end
from rank_threads import ranks_as_threads

from mie import SamplingParams
from mie.checkpoint.config import load_model_config
from mie.config.engine import EngineConfig
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ranks.share import why_not

MODELS = sorted((Path(__file__).parent / "models").iterdir())


def answers(directory, num_ranks):
    config = EngineConfig(num_blocks=32, block_size=4, max_num_batched_tokens=8, num_threads=1)
    settings = LoadSettings(engine=config, backend="jit", tensor_parallel_size=num_ranks)
    engine = load_engine(directory, settings)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=8, ignore_eos=True, logprobs=2)
    prompts = [rng.integers(0, engine.vocab_size, size).tolist() for size in (3, 17)]
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    run_to_end(engine)
    return [(seq.output_ids, seq.logprobs) for each in requests for seq in each.sequences]


@needs_numba
@pytest.mark.slow
@pytest.mark.parametrize("directory", MODELS, ids=lambda path: path.name)
def test_ranks_give_the_bits_of_one_for_every_family(directory):
    model = load_model_config(directory)
    num_ranks = next(number for number in range(2, 9) if why_not(model, number) is None)
    expected = answers(directory, 1)
    with ranks_as_threads():
        assert answers(directory, num_ranks) == expected
