"""Measure what concurrent streams cost: `AsyncLLM` compared with `LLM.generate`.

    python scripts/bench_callers.py [--streams 64] [--tokens 128] [--rounds 5]

Both serve the same prompts in one process and take turns. `LLM.generate` gets all prompts in one
call. With `AsyncLLM` each prompt has its own task, which takes every output. The table has the
median tokens per second, and the median and the range of the ratios of neighbouring turns.
SmolLM2-135M has its published shape, random weights and no tokenizer, so its prompts are token ids.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.cpu.shapes import LLAMA, SHAPES

from mie import LLM, AsyncLLM, RequestOutputKind, SamplingParams

PROMPTS = ("Once upon a time", "Tell me a story about Mia the fox", "The old mill by the lake")


def arguments_of(model: str, folder: Path) -> dict[str, Any]:
    """Return the arguments that load a model."""
    if model == "bundled":
        return {"model": model}
    (folder / "config.json").write_text(json.dumps({**LLAMA, **SHAPES[model]}))
    return {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True}


def prompts_of(model: str, count: int) -> list[Any]:
    """Return ``count`` prompts."""
    if model == "bundled":
        return [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    return [[5 + i, 6, 7, 8, 9, 10, 11, 12] for i in range(count)]


async def serve(llm: AsyncLLM, prompts: list[Any], params: SamplingParams) -> list[list[int]]:
    """Run one task for each prompt and return the tokens of each."""

    async def one(prompt: Any) -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate(prompt, params):
            tokens += output.outputs[0].token_ids
        return tokens

    return list(await asyncio.gather(*map(one, prompts)))


async def measure(model: str, folder: Path, streams: int, tokens: int, rounds: int) -> None:
    """Measure one model and print its row of the table."""
    settings = {**arguments_of(model, folder), "max_num_seqs": streams, "max_model_len": 512}
    prompts = prompts_of(model, streams)
    options = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    final, delta = (
        SamplingParams(**options, output_kind=kind)
        for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA)
    )
    llm = LLM(**settings)
    speeds: dict[str, list[float]] = {"LLM": [], "AsyncLLM": []}
    async with AsyncLLM(**settings) as served:
        for turn in range(rounds + 1):  # the first warms up
            begin = time.perf_counter()
            outputs = llm.generate(prompts, final, use_tqdm=False)
            middle = time.perf_counter()
            streamed = await serve(served, prompts, delta)
            end = time.perf_counter()
            assert streamed == [output.outputs[0].token_ids for output in outputs]
            if turn:
                speeds["LLM"].append(streams * tokens / (middle - begin))
                speeds["AsyncLLM"].append(streams * tokens / (end - middle))
    ratios = [b / a for a, b in zip(*speeds.values(), strict=True)]
    medians = "".join(f"{statistics.median(each):>12.0f}" for each in speeds.values())
    spread = f"{min(ratios):.2f} … {max(ratios):.2f}"
    print(f"{model:<16}{medians}{statistics.median(ratios):>8.2f}   {spread}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64, help="concurrent requests")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each")
    parser.add_argument("--rounds", type=int, default=5, help="turns that count")
    parser.add_argument("--models", nargs="+", default=["bundled", "SmolLM2-135M"])
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, OPENBLAS_CORETYPE unset")
    print(f"{'model':<16}{'LLM':>12}{'AsyncLLM':>12}{'ratio':>8}   range")
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure(model, Path(folder), args.streams, args.tokens, args.rounds))


if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith("OPENBLAS_")]:
        del os.environ[name]
    if os.environ.get("_MIE_BENCH_CHILD") != "1":  # NumPy has read them already
        import sys

        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, "_MIE_BENCH_CHILD": "1"}
        )
    main()
