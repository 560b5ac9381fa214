"""Make the golden adapters: random LoRA adapters, with the logits that PEFT computes with them.

    pip install torch transformers peft
    python scripts/make_adapters.py [MODEL ...] [--number 2] [--output tests/golden/adapters]

Each directory has the adapters of a model of ``tests/golden/models``, as PEFT saves them, and
``golden.npz`` with the logits, float32 [rows, V], of the model's long prompt: ``<adapter>.logits``.
The rows are the rows of the model's own golden file. ``provenance.json`` records the versions.

The adapters differ in rank, alpha, modules, patterns of both, and in rsLoRA. Each must change the
logits by more than a hundredth.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

MODELS = Path("tests/golden/models")
NAMES = ("llama31_gqa", "qwen3_qk_norm", "gemma3_two_ropes", "phi3_fused", "glm_interleaved")
MIN_EFFECT = 1e-2
SPLIT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def config_of(number: int, modules: list[str]) -> LoraConfig:
    """Return the settings of adapter ``number`` of a model with these modules."""
    rng = np.random.default_rng(number)
    some = modules if number % 3 == 0 else sorted(rng.permutation(modules)[:3].tolist())
    options: dict[str, Any] = {}
    if number % 4 == 1:
        options["rank_pattern"] = {some[0]: 3, f"layers.1.{_path(some[1])}": 5}
    if number % 4 in (1, 2):
        options["alpha_pattern"] = {f"^model.layers.0.{_path(some[0])}": 11, some[-1]: 3}
    return LoraConfig(
        r=int(rng.integers(1, 8)),
        lora_alpha=int(rng.integers(1, 24)),
        target_modules=some,
        use_rslora=number % 2 == 1,
        task_type="CAUSAL_LM",
        **options,
    )


def _path(module: str) -> str:
    is_of_attention = module in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
    return f"{'self_attn' if is_of_attention else 'mlp'}.{module}"


def make(name: str, number: int, directory: Path) -> np.ndarray:
    """Save an adapter, and return the logits with it."""
    model = AutoModelForCausalLM.from_pretrained(
        MODELS / name, dtype=torch.float32, attn_implementation="eager"
    )
    present = {each.rpartition(".")[2] for each, _ in model.named_modules()}
    modules = [each for each in SPLIT if each in present and "gate_up_proj" not in present]
    modules = modules or [each for each in FUSED if each in present]
    if "gate_up_proj" in present and "q_proj" in present:
        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]
    torch.manual_seed(number)
    adapted = get_peft_model(model, config_of(number, modules)).eval()
    with torch.no_grad():
        for each, parameter in adapted.named_parameters():
            if ".lora_" in each:
                size = parameter.shape[1] if ".lora_A" in each else 6 * parameter.shape[1]
                noise = torch.randn_like(parameter) / size**0.5
                # The file has 16 bits, and both sides read the same numbers.
                parameter.copy_(noise.to(torch.bfloat16).float())
    adapted.save_pretrained(directory)
    path = directory / "adapter_model.safetensors"
    save_file({k: v.to(torch.bfloat16) for k, v in load_file(path).items()}, path)
    path.chmod(0o644)
    (directory / "README.md").unlink(missing_ok=True)
    golden = np.load(MODELS / name / "golden.npz")
    ids = [*golden["long.ids"].tolist(), *golden["long.greedy"].tolist()]
    with torch.no_grad():
        logits = adapted(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    logits = logits[golden["long.rows"]]
    effect = np.abs(logits - golden["long.logits"]).max() / np.abs(logits).max()
    if effect < MIN_EFFECT:
        raise SystemExit(f"{name}: adapter {number} changes the logits by {effect:.1e} only")
    return logits


def main() -> None:
    """Make the adapters of the models named on the command line, or of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="MODEL", default=NAMES)
    parser.add_argument("--number", type=int, default=2, help="adapters of each model")
    parser.add_argument("--output", type=Path, default=Path("tests/golden/adapters"))
    args = parser.parse_args()
    for name in args.names:
        directory = args.output / name
        shutil.rmtree(directory, ignore_errors=True)
        logits = {
            f"{number}.logits": make(name, number, directory / str(number))
            for number in range(args.number)
        }
        np.savez_compressed(directory / "golden.npz", **logits)  # type: ignore[arg-type]
        provenance = {
            "name": name,
            "script": "scripts/make_adapters.py",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "computed": "PEFT on transformers, float32, eager attention, without a cache, on a CPU",
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "peft": peft.__version__,
                "numpy": np.__version__,
            },
        }
        (directory / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
        print(f"{directory}: {args.number} adapters")


if __name__ == "__main__":
    main()
