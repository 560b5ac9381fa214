"""Run Hugging Face transformers with the same loads in a separate process.

    python -m mie.sim.book.peer           as `mie.sim.book.child`

All concurrent requests form one batch of prompts of one length, which is the best case for its
`generate`.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from mie.sim.book.child import Load, answer, read_task


def main() -> None:
    """Run a task, or say why it cannot run. Its settings are mie's and are ignored here."""
    task = read_task()
    try:
        import torch
        import transformers
    except ImportError as error:
        print(
            json.dumps(
                {"skipped": f"{error.name} is not installed (pip install torch transformers)"}
            )
        )
        return
    torch.set_num_threads(task.num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(task.directory, dtype=torch.float32)
    model.eval()
    _generate(model, Load(num_requests=1, max_concurrency=1, input_len=16, output_len=4))  # warm-up
    loads = [
        {**asdict(load), "seconds": [_generate(model, load) for _ in range(task.num_rounds)]}
        for load in task.loads
    ]
    answer(loads, version=f"transformers {transformers.__version__}, torch {torch.__version__}")


def _generate(model: Any, load: Load) -> float:
    """Return the seconds for all requests."""
    import torch

    vocab_size = model.config.vocab_size
    prompts = torch.tensor(
        [request.token_ids(vocab_size, {}) for request in load.workload().requests]
    )
    start = time.perf_counter()
    for batch in prompts.split(load.max_concurrency):
        with torch.inference_mode():
            tokens = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                min_new_tokens=load.output_len,
                max_new_tokens=load.output_len,
                do_sample=False,
                pad_token_id=0,
            )
        assert tokens.shape[1] == load.input_len + load.output_len, "ended early"
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
