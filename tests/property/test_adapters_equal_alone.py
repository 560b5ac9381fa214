"""Check that other adapters in a step change no answer of a request with an adapter.

Random loads go through the real engine: in chunks, with prefix hits, forks, drafts, and preempted
by recompute and by swap. On jit, the tokens and their log-probabilities equal the request alone,
operator by operator, bit for bit. On NumPy in float64, the tokens equal the oracle's for the merged
weights W + s B A.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
from adapter_files import MODULES, merged, random_adapter, write_peft
from compiled import needs_numba
from engines import run_to_end
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_models import LLAMA, QWEN3_TIED, random_weights, write_model

from mie import EngineConfig, LoRARequest, SamplingParams
from mie.engine.engine import Engine
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

VOCAB, EOS = 40, 3
MODELS = {"llama": LLAMA, "qwen3": QWEN3_TIED}
ADAPTERS: list[dict[str, Any]] = [
    {"seed": 1, "rank": 1, "modules": MODULES},
    {"seed": 2, "rank": 5, "modules": ["self_attn.q_proj", "self_attn.v_proj"]},
    {"seed": 3, "rank": 8, "modules": ["mlp.up_proj", "mlp.down_proj", "self_attn.k_proj"]},
]
SCALE = 0.75
NUM_EXAMPLES = max(4, settings().max_examples // 20)

seen: Counter[str] = Counter()


class Tiny:
    """A tiny model, its weights, and its adapters on disk and merged into the weights."""

    def __init__(self, name: str, folder: Path) -> None:
        self.config, weights = MODELS[name], random_weights(MODELS[name])
        self.directory = write_model(folder / name, self.config, weights)
        self.weights: list[dict[str, NDArray[Any]]] = [merged(weights, {}, 0)]
        self.paths = []
        for number, options in enumerate(ADAPTERS):
            arrays = random_adapter(weights, **options)
            path = folder / f"{name}-{number}"
            alpha = SCALE * options["rank"]
            self.paths.append(write_peft(path, arrays, lora_alpha=alpha))
            self.weights.append(merged(weights, arrays, SCALE))
        self.alone: Engine | None = None
        """The engine on jit in which requests run one by one."""

    def engine(self, backend: str, **config: Any) -> Engine:
        """Return an engine with all adapters, in the slots 1, 2 and 3."""
        config = {"max_loras": 3, "max_lora_rank": 8, "enable_lora": True, **config}
        dtype = "float64" if backend == "numpy" else "float32"
        loading = LoadSettings(engine=EngineConfig(**config), backend=backend, dtype=dtype)
        engine = load_engine(self.directory, loading, use_tqdm=False)
        for number, path in enumerate(self.paths, start=1):
            request = LoRARequest(f"adapter {number}", number, str(path))
            added = engine.adapters.add(request, engine.adapters.read(request))
            assert added.slot == number
        return engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: Tiny(name, folder) for name in MODELS}


@st.composite
def loads(draw: st.DrawFn) -> dict[str, Any]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shared = rng.integers(0, VOCAB, 12).tolist()
    requests = []
    for _ in range(draw(st.integers(2, 5))):
        prompt = shared[: draw(st.sampled_from([0, 6, 12]))]
        prompt = prompt + rng.integers(0, VOCAB, draw(st.sampled_from([1, 3, 9]))).tolist()
        params = {
            "max_tokens": draw(st.integers(1, 8)),
            "temperature": draw(st.sampled_from([0.0, 0.8])),
            "seed": draw(st.integers(0, 9)),
            "n": draw(st.sampled_from([1, 1, 2])),
        }
        requests.append((prompt, params, draw(st.integers(0, 3)), draw(st.integers(0, 3))))
    config = {
        "block_size": draw(st.sampled_from([2, 4])),
        "num_blocks": draw(st.sampled_from([14, 20, 60])),
        "max_num_seqs": draw(st.integers(2, 6)),
        "max_num_batched_tokens": draw(st.sampled_from([5, 16, 64])),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap"])),
        "enable_prefix_caching": draw(st.booleans()),
        "max_model_len": 28,
    }
    if draw(st.booleans()):
        config["speculative_config"] = {"method": "suffix"}
    return {"model": draw(st.sampled_from([*MODELS])), "requests": requests, "config": config}


def start(engine: Engine, number: int, prompt: list[int], params: dict[str, Any], slot: int) -> Any:
    adapter = next((each for each in engine.adapters if each.slot == slot), None)
    return engine.add(
        [*prompt],
        SamplingParams(**params, logprobs=0),
        f"request {number}",
        priority=0,
        cache_salt=adapter.salt(None) if adapter else None,
        client=None,
        constraint=None,
        adapter=slot,
    )


def bits(request: Any) -> list[Any]:
    """Return the tokens of each choice, and the bits of their log-probabilities."""
    return [
        (
            seq.output_ids,
            seq.finish_reason,
            [[x.hex() for x in row.logprobs] for row in seq.logprobs],
        )
        for seq in request.sequences
    ]


def run_together(engine: Engine, load: dict[str, Any]) -> list[Any]:
    """Run the requests, each from a step of its own on, and return them."""
    requests: list[Any] = []
    waiting = sorted(enumerate(load["requests"]), key=lambda each: each[1][3])
    step = 0
    while waiting or engine.has_work:
        while waiting and (waiting[0][1][3] <= step or not engine.has_work):
            number, (prompt, params, slot, _) = waiting.pop(0)
            requests.append((number, start(engine, number, prompt, params, slot)))
        engine.step()
        step += 1
    stats = engine.scheduler.manager.stats
    seen["preempted"] += engine.stats.num_preemptions > 0
    seen["prefix hits"] += stats.num_hit_tokens > 0
    seen["several adapters"] += len({slot for _, _, slot, _ in load["requests"]}) > 2
    return [request for _, request in sorted(requests, key=lambda each: each[0])]


def check_bits(tiny: dict[str, Tiny], load: dict[str, Any]) -> None:
    model = tiny[load["model"]]
    together = run_together(model.engine("jit", **load["config"]), load)
    if model.alone is None:
        sizes = {"block_size": 4, "num_blocks": 60, "max_model_len": 28, "num_threads": 1}
        how = {"enable_prefix_caching": False, "enforce_eager": True}
        model.alone = model.engine("jit", **how, **sizes)
    for number, (prompt, params, slot, _) in enumerate(load["requests"]):
        request = start(model.alone, number, prompt, params, slot)
        run_to_end(model.alone)
        assert bits(together[number]) == bits(request), f"request {number} with adapter {slot}"


def check_tokens(tiny: dict[str, Tiny], load: dict[str, Any]) -> None:
    model = tiny[load["model"]]
    together = run_together(model.engine("numpy", **load["config"]), load)
    for request, (prompt, params, slot, _) in zip(together, load["requests"], strict=True):
        for seq in request.sequences:
            wanted = naive.generate(
                model.config,
                model.weights[slot],
                prompt,
                params,
                choice=seq.index,
                eos=[EOS],
                limit=28,
            )
            assert (seq.output_ids, seq.finish_reason) == wanted[:2], f"adapter {slot}"


@needs_numba
@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(load=loads())
def test_a_request_has_the_bits_that_it_has_alone(tiny: dict[str, Tiny], load: Any) -> None:
    check_bits(tiny, load)


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(load=loads())
def test_tokens_are_those_of_the_merged_weights(tiny: dict[str, Tiny], load: Any) -> None:
    check_tokens(tiny, load)


@pytest.mark.slow
@needs_numba
def test_five_hundred_loads_reach_every_case(tiny: dict[str, Tiny]) -> None:
    seen.clear()

    @settings(max_examples=500, deadline=None)
    @given(load=loads())
    def check(load: Any) -> None:
        check_bits(tiny, load)

    check()
    assert all(seen[name] for name in ("preempted", "prefix hits", "several adapters")), seen
