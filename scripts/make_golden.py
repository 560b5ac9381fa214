"""Make the golden models: tiny random models, with the logits that Hugging Face computes for them.

    pip install '.[bench]' safetensors
    python scripts/make_golden.py [NAME ...] [--output tests/golden/models]

Each directory is a model as transformers saves it. ``golden.npz`` has the rotation frequencies that
transformers computed and, for each prompt:

    <prompt>.ids      the prompt
    <prompt>.greedy   64 greedy tokens after it, with the end-of-sequence token disabled
    <prompt>.rows     positions in prompt + greedy whose logits are recorded
    <prompt>.logits   those logits, float32 [rows, V]

``provenance.json`` records versions and the seed.

A model is kept only if it can tell right from wrong. Logits must spread. Greedy tokens must vary,
and lead by a margin that float32 noise cannot reverse. Each feature that the case is about
(``without``) must change the logits when it is switched off.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

NUM_GREEDY = 64
MIN_GAP = 1e-3  # between the two largest logits at every greedy step
MIN_DISTINCT = 12  # Tokens among the greedy ones.
MIN_EFFECT = 1e-2  # Relative change of the logits when a feature is off.
MAX_NOISE = 1e-5  # relative change of the logits by float64 arithmetic and RoPE's last bit
MAX_SEEDS = 60

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 101,
}
"""The configuration of each case, except for the keys that it sets."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model of `golden_cases.json`: its configuration, and the features it is about."""

    name: str
    about: str
    config_class: type[PretrainedConfig]
    config: Mapping[str, Any]
    dtype: torch.dtype
    max_shard_size: str = "1GB"
    transformers_4_config: bool = False
    prompt_lengths: Mapping[str, int] = field(default_factory=lambda: {"short": 5, "long": 40})
    without: Sequence[Mapping[str, Any]] = ()
    """Changes of the configuration that must change the logits."""


def read_cases() -> tuple[Case, ...]:
    """Return the cases of `golden_cases.json`."""
    text = Path(__file__).with_name("golden_cases.json").read_text(encoding="utf-8")
    return tuple(
        Case(
            config_class=getattr(transformers, values.pop("class")),
            config={**SMALL, **values.pop("config")},
            dtype=getattr(torch, values.pop("dtype", "bfloat16")),
            **values,
        )
        for values in json.loads(text)
    )


CASES = read_cases()


class Unsuitable(Exception):
    """The random weights of one seed make a model that cannot tell right from wrong."""


def make(case: Case, directory: Path) -> None:
    """Write the golden directory of ``case``, with the first seed that makes a suitable model."""
    for seed in range(MAX_SEEDS):
        save_model(case, seed, directory)
        try:
            arrays, facts = record(case, seed, directory)
        except Unsuitable as reason:
            print(f"  seed {seed}: {reason}")
            continue
        np.savez_compressed(directory / "golden.npz", **arrays)  # type: ignore[arg-type]
        write_json(directory / "provenance.json", provenance(case, seed) | facts)
        return
    raise SystemExit(f"{case.name}: none of {MAX_SEEDS} seeds is suitable")


def save_model(case: Case, seed: int, directory: Path) -> None:
    """Save a random model, replacing ``directory``."""
    if directory.exists():
        shutil.rmtree(directory)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(case.config_class(**case.config))
    randomize(model)
    model.to(case.dtype).save_pretrained(directory, max_shard_size=case.max_shard_size)
    for path in directory.glob("*.safetensors"):
        path.chmod(0o644)
    if case.transformers_4_config:
        path = directory / "config.json"
        write_json(path, spelled_as_transformers_4(json.loads(path.read_text())))


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Draw weights under which activations keep their size and logits spread.

    Attention must also select.
    """
    adds_one = model.config.model_type.startswith(
        ("gemma", "qwen3_5", "qwen3_next")
    )  # to the weights of norms
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if "norm" in name:
            around = 0.0 if adds_one and "linear_attn." not in name else 1.0
            parameter.copy_(around + 0.2 * noise)
        elif parameter.dim() == 1 and not name.endswith(".bias"):  # the heads of recurrent layers
            around = {"A_log": -0.5, "dt_bias": -1.0}.get(name.rpartition(".")[2], 1.0)
            parameter.copy_(around + 0.5 * noise)
        elif "conv" in name and parameter.dim() == 3:  # the convolutions of recurrent layers
            parameter.copy_(noise / parameter.shape[2] ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(noise * gain(name) / parameter.shape[-1] ** 0.5)

    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(0.2 * torch.randn_like(buffer))


def gain(name: str) -> float:
    """Return the standard deviation of a matrix's outputs for inputs of standard deviation one."""
    gains = {"q_proj": 1.6, "k_proj": 1.6, "down_proj": 2.5, "lm_head": 3.0, "embed_tokens": 3.0}
    return next((value for part, value in gains.items() if part in name), 1.0)


def spelled_as_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same configuration with the keys of transformers 4."""
    config = dict(config)
    scaling = dict(config.pop("rope_parameters"))
    config["rope_theta"] = scaling.pop("rope_theta")
    rope_type = scaling.pop("rope_type")
    config["rope_scaling"] = None if rope_type == "default" else {"type": rope_type, **scaling}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    if config["model_type"] == "qwen2":  # transformers 5 saves the window that is in use
        config["sliding_window"] = 8
    config["transformers_version"] = "4.40.0"
    return dict(sorted(config.items()))


def record(case: Case, seed: int, directory: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of ``golden.npz`` and the facts for the provenance."""
    model = load(directory)
    generator = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    gaps, spreads = [], []
    for prompt, length in case.prompt_lengths.items():
        ids = generator.integers(0, model.config.vocab_size, length).tolist()
        greedy, gap = greedy_tokens(model, ids)
        rows = chosen_rows(length)
        logits = all_logits(model, ids + greedy)[rows]
        arrays |= {
            f"{prompt}.ids": np.asarray(ids, dtype=np.int32),
            f"{prompt}.greedy": np.asarray(greedy, dtype=np.int32),
            f"{prompt}.rows": np.asarray(rows, dtype=np.int32),
            f"{prompt}.logits": logits,
        }
        gaps.append(gap)
        spreads.append(float(logits.std()))
    if not 1.5 < min(spreads) <= max(spreads) < 5:
        raise Unsuitable(f"logits have standard deviations {spreads}")
    noise = float32_noise(model, arrays)
    effects = [effect_of(change, case, directory, arrays) for change in case.without]
    rotary = rotary_of(load(directory))
    if rotary is not None:  # Granite 4 may have no positions
        kind = "" if hasattr(rotary, "inv_freq") else "full_attention_"
        arrays["rope.inv_freq"] = getattr(rotary, kind + "inv_freq").numpy()
        scaling = getattr(rotary, kind + "attention_scaling")
        arrays["rope.attention_scaling"] = np.asarray(scaling, dtype=np.float64)
    return arrays, {
        "greedy_min_gap": min(gaps),
        "logits_std": spreads,
        "float32_noise": noise,
        "effect_of_each_change": effects,
    }


def load(directory: Path, **changes: Any) -> Any:
    """Load the saved model in float32, with some keys of its configuration changed."""
    config = AutoConfig.from_pretrained(directory)
    if changes:
        values = config.to_dict() | changes
        config = type(config)(**values)
    return AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()


@torch.no_grad()
def all_logits(model: Any, ids: list[int]) -> np.ndarray:
    """Return the logits after every token without a cache, as float32 [len(ids), V]."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


def greedy_tokens(model: Any, ids: list[int]) -> tuple[list[int], float]:
    """Return greedy tokens and the smallest lead of one over the runner-up."""
    sequence, min_gap = list(ids), float("inf")
    for _ in range(NUM_GREEDY):
        logits = all_logits(model, sequence)[-1]
        second, first = np.partition(logits, -2)[-2:]
        min_gap = min(min_gap, float(first - second))
        sequence.append(int(logits.argmax()))
    greedy = sequence[len(ids) :]
    if min_gap <= MIN_GAP:
        raise Unsuitable(f"a greedy token leads by {min_gap:.1e} only")
    if len(set(greedy)) < MIN_DISTINCT:
        raise Unsuitable(f"only {len(set(greedy))} distinct greedy tokens")
    return greedy, min_gap


def chosen_rows(prompt_length: int) -> list[int]:
    """Return rows at both ends of the prompt, within it, and among the tokens after it."""
    last = prompt_length + NUM_GREEDY - 1
    rows = {0, 1, 2, prompt_length // 2, prompt_length - 1, prompt_length, last - 20, last}
    return sorted(rows)


def rotary_of(model: Any) -> Any:
    """Return the module with the rotations, or None. LFM2 with experts has another name for it."""
    return model.model.pos_emb if hasattr(model.model, "pos_emb") else model.model.rotary_emb


def difference(model: Any, arrays: Mapping[str, np.ndarray]) -> float:
    """Return the largest difference of the model's logits from the recorded ones.

    The difference is relative to the recorded logits.
    """
    ids = [*arrays["long.ids"].tolist(), *arrays["long.greedy"].tolist()]
    wanted = arrays["long.logits"]
    got = all_logits(model, ids)[arrays["long.rows"]]
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def float32_noise(model: Any, arrays: Mapping[str, np.ndarray]) -> float:
    """Return how far rounding moves the logits of the long prompt. Turns the model to float64.

    Rotary frequencies stay float32 in transformers, so they are moved by one in the last place.
    """
    rotary = rotary_of(model.double())
    for name, frequencies in [] if rotary is None else rotary.named_buffers():
        if name.endswith("inv_freq"):
            frequencies.mul_(1 + 2**-23)
    noise = difference(model, arrays)
    if noise > MAX_NOISE:
        raise Unsuitable(f"rounding moves the logits by {noise:.1e}")
    return noise


def effect_of(
    change: Mapping[str, Any], case: Case, directory: Path, arrays: Mapping[str, np.ndarray]
) -> float:
    """Return the relative change of the long prompt's logits with ``change``."""
    model = load(directory, **change)
    effect = difference(model, arrays)
    if effect < MIN_EFFECT:
        raise Unsuitable(f"{change} changes the logits by {effect:.1e} only")
    return effect


def provenance(case: Case, seed: int) -> dict[str, Any]:
    """Return the versions and the seed of this golden file."""
    return {
        "name": case.name,
        "about": case.about,
        "script": "scripts/make_golden.py",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "seed": seed,
        "computed": "transformers, float32, eager attention, without a cache, on a CPU",
        "config": "keys rewritten as in transformers 4"
        if case.transformers_4_config
        else "as transformers saved it",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "safetensors": safetensors.__version__,
        },
    }


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as transformers writes its files."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Make the cases named on the command line, or all."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--output", type=Path, default=Path("tests/golden/models"))
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(names))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for case in CASES:
        if not args.names or case.name in args.names:
            print(case.name, flush=True)
            make(case, args.output / case.name)


if __name__ == "__main__":
    main()
