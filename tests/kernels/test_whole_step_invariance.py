"""Check that with ``batch_invariant=True`` a request's bits do not depend on the batch on a GPU.

Requests run together, arriving at different steps, in chunks and with prefix hits. Their
log-probabilities must be those of each request alone, in one piece and without a cache.
"""

from pathlib import Path
from typing import Any

import numpy as np
import on_device
import pytest
import tiny_models
from emulated import needs_compiler

from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops.backend import Backend, StepBatch

pytestmark = needs_compiler

ODD = {"hidden_size": 100, "intermediate_size": 130, "head_dim": 40}
WIDE = {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
MODELS = {
    "plain": tiny_models.LLAMA | ODD,
    "biases": tiny_models.QWEN2 | WIDE,
    "head norms": tiny_models.QWEN3_TIED | ODD,
    "tensor cores": tiny_models.LLAMA | WIDE,
}
QUICK = {("tensor cores", "bfloat16")}
CASES = [
    pytest.param(name, dtype, marks=[] if (name, dtype) in QUICK else [pytest.mark.slow])
    for name in MODELS
    for dtype in ("float32", "bfloat16")
]
SIZES = {"max_position_embeddings": 512, "eos_token_id": 39}
DEVICES = ["cupy-emulated", *(["cupy"] if on_device.IS_WANTED else [])]
SHARED = list(range(4, 37))
PROMPTS = [[*SHARED, 7, 9, 30], SHARED[:20], SHARED + [21] * 14, [5, 6], [31] * 17]
ARRIVALS = [0, 3, 7, 9, 9]
NUM_TOKENS = 9


class Run:
    """The log-probabilities of each request, and the numbers of queries of each step."""

    def __init__(self, model: Path, numbers: list[int], machine: dict[str, Any], **settings: Any):
        self.steps: list[np.ndarray] = []
        config = EngineConfig(num_blocks=60, block_size=16, batch_invariant=True, **settings)
        engine = load_engine(model, LoadSettings(engine=config, **machine), wrap=self._recorded)
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=-1)
        waiting, step, requests = set(numbers), 0, {}
        while waiting or engine.has_work:
            for number in [each for each in waiting if ARRIVALS[each] <= step or len(numbers) == 1]:
                waiting.remove(number)
                requests[number] = engine.add_request(PROMPTS[number], params)
            engine.step()
            step += 1
        self.num_hits = sum(each.metrics.num_cached_tokens > 0 for each in requests.values())
        self.logprobs = {
            number: [
                (row.token_ids[0], sorted(zip(row.token_ids, row.logprobs, strict=True)))
                for row in request.sequences[0].logprobs
            ]
            for number, request in requests.items()
        }

    def _recorded(self, backend: Backend) -> Backend:
        run_step = backend.run_step

        def recorded(forward: Any, batch: StepBatch) -> Any:
            self.steps.append(np.diff(batch.cu_seqlens_q))
            return run_step(forward, batch)

        backend.run_step = recorded  # type: ignore[method-assign]
        return backend


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_request_gets_the_same_bits_alone_and_in_a_batch(
    tmp_path: Path, device: str, name: str, dtype: str
):
    """The second prompt begins the first one, so all but its last token come from the cache."""
    config = MODELS[name] | SIZES
    model = tiny_models.write_model(tmp_path, config, tiny_models.random_weights(config))
    machine = {"backend": device, "dtype": dtype}
    together = Run(model, list(range(len(PROMPTS))), machine, max_num_batched_tokens=21)
    assert together.num_hits > 0
    sizes = [step.sum() for step in together.steps]
    assert any(len(step) > 1 and step.max() > 1 for step in together.steps), "never mixed"
    assert max(sizes) > 16, "never more rows than a block has"
    for number in range(len(PROMPTS)):
        alone = Run(model, [number], machine, enable_prefix_caching=False)
        assert len(alone.logprobs[number]) == NUM_TOKENS
        assert max(map(max, alone.steps)) == len(PROMPTS[number])
        assert together.logprobs[number] == alone.logprobs[number]
