"""Speed on a CPU, beside Hugging Face transformers in the same run.

    pip install "mie[bench]"
    python scripts/bench_cpu.py [--models SmolLM2-135M ...] [--rounds 3] [--output PREFIX]

Models of published shapes with random weights, float32, greedy, end-of-sequence disabled:

    one request     a 16-token prompt and 64 new tokens; mie against `generate`
    64 requests     16-token prompts and 150 new tokens each, end to end; mie with all at once
                    against `generate` one after another (its rate is measured on a few of them)

Each engine lives in a process of its own, restricted to the same CPUs; while one is measured the
other sleeps. Rounds alternate between the two, and medians are compared. Variables that tune
OpenBLAS are removed from the environment, so that mie runs as it does for its users.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from mie.model.config import ModelConfig
from mie.model.weights import expected_tensors

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "TinyLlama-1.1B": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
    },
    "SmolLM2-135M": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "toy": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
}
PUBLISHED = ("TinyLlama-1.1B", "SmolLM2-135M")
ENGINES = ("mie", "transformers")
PROMPT_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What both engines are asked, and by how much mie should be faster."""

    name: str
    num_requests: int
    num_new_tokens: int
    wanted_ratio: float


WORKLOADS = (
    Workload(name="one request", num_requests=1, num_new_tokens=64, wanted_ratio=1.5),
    Workload(name="64 requests", num_requests=64, num_new_tokens=150, wanted_ratio=10.0),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Tokens per second of both engines on one workload, round by round."""

    model: str
    workload: str
    wanted_ratio: float
    tokens_per_second: dict[str, list[float]]

    @property
    def medians(self) -> dict[str, float]:
        """The median of each engine."""
        return {name: statistics.median(each) for name, each in self.tokens_per_second.items()}

    @property
    def ratio(self) -> float:
        """How many times faster mie is."""
        return self.medians["mie"] / self.medians["transformers"]


def write_random_model(name: str, directory: Path, dtype: str) -> None:
    """A model directory of the published shape, with weights that keep activations finite."""
    config = {**LLAMA, **SHAPES[name]}
    (directory / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(0)
    file_dtype = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}[dtype]
    tensors = {}
    for tensor, shape in expected_tensors(ModelConfig.from_hf(config)).items():
        if len(shape) == 1:
            tensors[tensor] = np.ones(shape, file_dtype)
        else:
            values = generator.standard_normal(shape, dtype=np.float32)
            tensors[tensor] = (values / np.sqrt(shape[1], dtype=np.float32)).astype(file_dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def random_prompts(vocab_size: int, num_requests: int, seed: int) -> list[list[int]]:
    """Prompts without a common beginning."""
    generator = np.random.default_rng(seed)
    return generator.integers(3, vocab_size, (num_requests, PROMPT_LENGTH)).tolist()


# In the children.


class MieEngine:
    """All requests at once."""

    def __init__(self, directory: str, threads: int) -> None:
        from mie import LLM

        self._llm = LLM(
            directory, skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=64
        )

    def generate(self, prompts: list[list[int]], num_new_tokens: int) -> list[int]:
        """How many tokens each request got."""
        from mie import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


class TransformersEngine:
    """One request after another, with `generate` as it comes."""

    def __init__(self, directory: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], num_new_tokens: int) -> list[int]:
        """How many tokens each request got."""
        import torch

        lengths = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                output = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=num_new_tokens,
                    pad_token_id=0,
                )
            lengths.append(output.shape[1] - len(prompt))
        return lengths


def serve_measurements(engine_name: str, directory: str, threads: int) -> None:
    """Loads an engine, then answers each line of stdin (a request) with a line (seconds)."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    engine_class = {"mie": MieEngine, "transformers": TransformersEngine}[engine_name]
    engine = engine_class(directory, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        lengths = engine.generate(request["prompts"], request["num_new_tokens"])
        seconds = time.perf_counter() - start
        assert lengths == [request["num_new_tokens"]] * len(request["prompts"]), lengths
        print(seconds, flush=True)


# In the parent.


class Child:
    """An engine in a process of its own."""

    def __init__(self, engine: str, directory: Path, threads: int) -> None:
        arguments = ["--child", engine, "--directory", directory, "--threads", threads]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(threads),
        )
        self._answer()

    def measure(self, prompts: list[list[int]], num_new_tokens: int) -> float:
        """New tokens per second of the requests, end to end."""
        assert self._process.stdin is not None
        request = {"prompts": prompts, "num_new_tokens": num_new_tokens}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return len(prompts) * num_new_tokens / float(self._answer())

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a child ended with exit code {self._process.wait()}")
        return line.strip()


def child_environment(threads: int) -> dict[str, str]:
    """What a user has, and the number of threads."""
    kept = {k: v for k, v in os.environ.items() if not re.match("OPENBLAS_|MKL_|OMP_|GOMP_", k)}
    return {**kept, "OMP_NUM_THREADS": str(threads)}


@contextlib.contextmanager
def running_engines(directory: Path, threads: int) -> Iterator[dict[str, Child]]:
    """A child for each engine, loaded and warm."""
    children: dict[str, Child] = {}
    try:
        for engine in ENGINES:
            children[engine] = Child(engine, directory, threads)
        yield children
    finally:
        for child in children.values():
            child.close()


def bench_model(name: str, args: argparse.Namespace) -> list[Result]:
    """Every workload on one model."""
    with tempfile.TemporaryDirectory(prefix="mie-bench-") as temporary:
        directory = Path(temporary)
        write_random_model(name, directory, args.dtype)
        with running_engines(directory, args.threads) as children:
            vocab_size = SHAPES[name]["vocab_size"]
            for child in children.values():
                child.measure(random_prompts(vocab_size, 1, seed=0), 8)
            return [bench_workload(name, workload, children, args) for workload in WORKLOADS]


def bench_workload(
    model: str, workload: Workload, children: Mapping[str, Child], args: argparse.Namespace
) -> Result:
    """Alternating rounds of both engines."""
    rates: dict[str, list[float]] = {engine: [] for engine in children}
    num_requests = {
        "mie": workload.num_requests,
        "transformers": min(workload.num_requests, args.baseline_requests),
    }
    for number in range(1, args.rounds + 1):
        prompts = random_prompts(SHAPES[model]["vocab_size"], workload.num_requests, number)
        for engine, child in children.items():
            rate = child.measure(prompts[: num_requests[engine]], workload.num_new_tokens)
            rates[engine].append(rate)
            print(f"{model}, {workload.name}, round {number}: {engine} {rate:.1f} tokens/s")
    return Result(
        model=model,
        workload=workload.name,
        wanted_ratio=workload.wanted_ratio,
        tokens_per_second=rates,
    )


def machine_state(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures hold for."""
    import torch
    import transformers

    cpu_info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"model name\s*:\s*(.*)", cpu_info)
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[call-overload]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        "cpu": cpu[1] if cpu else platform.processor(),
        "avx512": " avx512f " in cpu_info,
        "cpus": os.cpu_count(),
        "threads": args.threads,
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "blas": f"{blas.get('name')} {blas.get('version')}",
        "removed_variables": sorted(set(os.environ) - set(child_environment(args.threads))),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "weights": args.dtype,
        "computed_in": "float32",
        "rounds": args.rounds,
        "baseline_requests": args.baseline_requests,
    }


def as_markdown(state: Mapping[str, Any], results: list[Result]) -> str:
    """The state as a list and the results as a table; tokens per second are medians (min–max)."""
    lines = [f"* {key}: {value}" for key, value in state.items()]
    lines += ["", "| model | workload | mie, tokens/s | transformers, tokens/s | ratio | wanted |"]
    lines.append("|---|---|---|---|---|---|")
    for result in results:
        rates = [
            f"{result.medians[engine]:.1f} ({min(each):.1f}–{max(each):.1f})"
            for engine, each in result.tokens_per_second.items()
        ]
        verdict = "met" if result.ratio >= result.wanted_ratio else "missed"
        lines.append(
            f"| {result.model} | {result.workload} | {' | '.join(rates)} | "
            f"{result.ratio:.2f} × | {result.wanted_ratio:g} ×: {verdict} |"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """The command line, for people and (``--child``) for the script itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=PUBLISHED, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="CPUs that both may use")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16", help="of the files")
    parser.add_argument(
        "--baseline-requests", type=int, default=2, help="how many of 64 transformers runs"
    )
    parser.add_argument("--output", metavar="PREFIX", help="writes PREFIX.json and PREFIX.md")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measures, prints, and writes the results."""
    args = parse_arguments()
    if args.child:
        serve_measurements(args.child, args.directory, args.threads)
        return
    state = machine_state(args)
    results = [result for name in args.models for result in bench_model(name, args)]
    report = as_markdown(state, results)
    print(f"\n{report}")
    if args.output:
        figures = [asdict(result) | {"ratio": result.ratio} for result in results]
        text = json.dumps({"state": state, "results": figures}, indent=2)
        Path(f"{args.output}.json").write_text(text + "\n")
        Path(f"{args.output}.md").write_text(report + "\n")


if __name__ == "__main__":
    main()
