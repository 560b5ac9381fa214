"""Compare two checkouts of mie on random scenarios, number by number and event by event.

    python scripts/same_bits.py HEAD~1 .                # 60 scenarios; commits or directories
    python scripts/same_bits.py OLD NEW --scenarios 300 --seed 1
    python scripts/same_bits.py OLD NEW --only 17       # one scenario, which is also printed

A scenario draws a model, a backend, settings and requests. Each checkout runs all scenarios in a
process of its own. The outputs of every step, the event log and the metrics must be equal, and
floats bit by bit. On numpy the order of sums depends on the shapes that reach the BLAS, so a
rewrite may need `--tolerance`. Times are left out, and so are the names in `LEFT_OUT`.
"""

import argparse
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

LEFT_OUT = re.compile(r"numerics|start|.*seconds|.*_time|.*_bytes.*")
"""Names of values that are not compared: times, sizes in bytes, and the names of backends."""

MODELS = {
    "bundled": ("bundled",),
    "dense": ("llama", "qwen2", "qwen3_tied", "granite", "phi3", "glm4"),
    "windows": ("mistral_window", "gemma2", "gemma3", "olmo3", "exaone4"),
    "recurrent": ("lfm2", "qwen35", "granite4"),
    "experts": ("qwen3_moe", "gpt_oss"),
    "quantised": ("bundled",),
}
"""The models of each kind. Models of tests/data/tiny_models.json have 40 tokens and no text."""

TEXT = ("bundled", "quantised")
"""The kinds of models with a tokenizer."""

COUNTED = ("preempt", "export", "import", "hit", "copy", "evict", "fork", "branch", "force")
"""Kinds of events that the summary counts, to show what the scenarios reach."""

WORDS = ("the", "a", "little", "girl", "dog", "was", "happy", "and", "ran", "to", "big", "ball")
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"regex": "(yes|no), [a-z]{1,5}"},
    {"choice": ["Once", "the dog", "a cat"]},
    {"json": {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}},
)

Json = dict[str, Any]


class Draw(random.Random):
    """Random scenarios."""

    def maybe(self, share: float, values: Json, **others: Any) -> None:
        """Add values to a dictionary in a share of the cases."""
        if self.random() < share:
            values.update(others)

    def scenario(self) -> Json:
        """Return a model, settings and requests, as JSON values."""
        kind = self.choice(list(MODELS))
        model, backend = self.choice(MODELS[kind]), self.choice(("jit", "numpy"))
        door = self.choices(("steps", "generate", "beams"), (8, 2, 1))[0]
        settings = self.settings(kind, backend)
        is_fair = settings["scheduling_policy"] == "fair"
        bases = [self.prompt(model, self.randint(8, 24)) for _ in range(2)]
        requests = [
            self.request(model, self.choice(bases), is_fair) for _ in range(self.randint(2, 7))
        ]
        beams = {"beam_width": self.randint(1, 3), "max_tokens": self.randint(1, 6)}
        self.maybe(0.3, beams, temperature=0.7, length_penalty=1.3, ignore_eos=True)
        ids = range(len(requests))
        aborts = [[self.randint(1, 20), self.choice(ids)] for _ in range(self.choice((0, 0, 1, 2)))]
        if settings["scheduling_policy"] != "priority":
            requests = [each | {"priority": 0} for each in requests]
        return {"kind": kind, "model": model, "door": door, "settings": settings} | {
            "requests": requests, "aborts": aborts, "beams": beams
        }  # fmt: skip

    def settings(self, kind: str, backend: str) -> Json:
        """Return settings with so few blocks that sequences are preempted and blocks evicted."""
        context, size = self.choice((40, 64, 96)), self.choice((1, 2, 3, 4, 8, 16))
        found: Json = {"backend": backend, "dtype": "float32"}
        if backend == "jit":
            found["num_threads"] = 1
        found |= {"max_model_len": context, "block_size": size, "max_num_seqs": self.randint(1, 6)}
        found["num_blocks"] = 1 + self.choice((40, 48, 64, 90, 160)) // size
        found["max_num_batched_tokens"] = self.choice((8, 16, 48, 256))
        found["scheduling_policy"] = self.choice(("fcfs", "fcfs", "priority", "sjf", "fair"))
        found["seed"] = self.randint(0, 99)
        policy = found["scheduling_policy"]
        if policy == "fair":
            self.maybe(0.5, found, fair_turn=self.randint(1, 6))
            self.maybe(0.4, found, client_quotas={"a": {"weight": 3.0, "max_num_seqs": 2}})
        if policy == "sjf":
            self.maybe(0.5, found, sjf_ageing=self.randint(1, 4))
        num_bytes = self.choice((16, 64, 256)) * size * (4096 if kind in TEXT else 512)
        self.maybe(0.3, found, preemption_mode="swap", swap_space=num_bytes)
        self.maybe(0.15, found, batching="static")
        if found.get("batching") != "static":
            self.maybe(0.2, found, admit_after_preemption=True)
        self.maybe(0.2, found, enable_prefix_caching=False)
        if found.get("enable_prefix_caching", True):
            self.maybe(0.2, found, max_cached_blocks=self.randint(0, 6))
            if kind == "recurrent":
                self.maybe(0.6, found, state_snapshot_distance=self.randint(1, 4))
        if kind == "recurrent":
            self.maybe(0.5, found, state_memory=self.choice((4, 8, 20)) << 10)
        self.maybe(0.3, found, partial_block_sharing=False)
        if self.random() < 0.15:
            found |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}
        else:
            self.maybe(0.4, found, max_prefill_chunk=self.randint(1, 9))
        self.maybe(0.5, found, watermark=self.choice((0, 0.1, 0.4)))
        if kind != "recurrent":
            self.maybe(0.2, found, async_scheduling=True)
        self.maybe(0.2, found, max_forced_run=self.choice((0, 3)))
        self.maybe(0.25, found, kv_cache_dtype=self.choice(("int8", "fp8")))
        if kind == "bundled":
            self.maybe(0.2, found, weight_dtype="float32")
        if kind == "quantised":
            found["quantization"] = self.choice(("int8", "int4"))
            self.maybe(0.3, found, head_dtype="file")
            self.maybe(0.5, found, activations="int8")
        return found

    def prompt(self, model: str, size: int) -> list[Any]:
        """Return words of a text, or token ids."""
        if model == "bundled":
            return ["Once", *self.choices(WORDS, k=size)]
        return [1, *(self.randint(4, 39) for _ in range(size))]

    def request(self, model: str, base: list[Any], is_fair: bool) -> Json:
        """Return a request with a prompt that shares its beginning with others."""
        prompt = base[: self.randint(2, len(base))] + self.prompt(model, self.randint(0, 5))[1:]
        ids = list(range(4, 40)) if model != "bundled" else list(range(300, 340))
        most = self.randint(4, 20)
        params: Json = {"max_tokens": most, "temperature": self.choice((0, 0, 0.6, 1, 1.5))}
        self.maybe(0.2, params, n=self.randint(2, 3))
        self.maybe(0.6, params, seed=self.randint(0, 9))
        self.maybe(0.25, params, top_k=self.randint(1, 12))
        self.maybe(0.25, params, top_p=self.choice((0.3, 0.7, 0.95)))
        self.maybe(0.15, params, min_p=0.1)
        self.maybe(0.2, params, repetition_penalty=self.choice((0.8, 1.4)))
        self.maybe(0.2, params, presence_penalty=0.7, frequency_penalty=-0.4)
        self.maybe(0.2, params, logit_bias={i: self.uniform(-3, 3) for i in self.sample(ids, 3)})
        self.maybe(0.1, params, allowed_token_ids=self.sample(ids, 6))
        self.maybe(0.1, params, bad_words_token_ids=[self.sample(ids, 1), self.sample(ids, 2)])
        self.maybe(0.15, params, stop_token_ids=self.sample(ids, 4))
        self.maybe(0.15, params, min_tokens=self.randint(1, most))
        self.maybe(0.3, params, logprobs=self.choice((0, 2, 5)))
        self.maybe(0.15, params, prompt_logprobs=self.choice((0, 3)))
        self.maybe(0.2, params, ignore_eos=True)
        self.maybe(0.1, params, trace_decode_token_ids=self.sample(ids, 3))
        self.maybe(0.1, params, truncate_prompt_tokens=self.choice((-1, 3)))
        if model == "bundled":
            self.maybe(0.3, params, stop=self.choice((".", [" the", "wa"], "e w")))
            self.maybe(0.2, params, include_stop_str_in_output=True)
            self.maybe(0.15, params, bad_words=["the", "was"])
            if self.random() < 0.15:
                params = {
                    "max_tokens": 24,
                    "structured_outputs": self.choice(STRUCTURES),
                    "seed": 1,
                }
        request: Json = {"step": self.choice((0, 0, self.randint(1, 12)))}
        request["prompt"] = " ".join(prompt) if model == "bundled" else prompt
        request["output_kind"] = self.choice(("CUMULATIVE", "CUMULATIVE", "DELTA", "FINAL_ONLY"))
        request |= {"params": params, "priority": self.randint(-2, 2)}
        request["client"] = self.choice(("a", "b", None)) if is_fair else None
        request["salt"] = self.choice((None, None, None, "salt"))
        return request


# The child: one checkout runs all scenarios.


def write_models(directory: Path) -> None:
    """Write the tiny models with the modules of a checkout's tests."""
    from tiny_hybrids import TinyHybrid
    from tiny_models import CONFIGS, TinyModel

    for kind, names in MODELS.items():
        for name in names:
            if name != "bundled" and not (directory / name).exists():
                (TinyHybrid if kind == "recurrent" else TinyModel)(directory / name, CONFIGS[name])


def run_all(directory: Path) -> None:
    """Run the scenarios of standard input, and print a line of results for each."""
    for line in sys.stdin:
        scenario = json.loads(line)
        try:
            result = run(scenario, directory)
        except Exception as error:  # a result: both checkouts must refuse the same
            result = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(result), flush=True)


def run(scenario: Json, directory: Path) -> Json:
    """Run one scenario, and return its outputs, events and metrics as JSON values."""
    from mie import LLM, BeamSearchParams

    settings = dict(scenario["settings"])
    model, trace = scenario["model"], io.StringIO()
    if model != "bundled":
        model, settings["skip_tokenizer_init"] = str(directory / model), True
    llm = LLM(model, trace=trace, use_tqdm_on_load=False, **settings)
    outputs: list[Any] = []
    if scenario["door"] == "beams":
        prompts = [_prompt(each) for each in scenario["requests"]]
        for found in llm.beam_search(prompts, BeamSearchParams(**scenario["beams"])):
            outputs.append([_plain(vars(each)) for each in found.sequences])
    elif scenario["door"] == "generate":
        requests = scenario["requests"]
        given = [_params(each) for each in requests]
        priority = None
        if settings["scheduling_policy"] == "priority":
            priority = [each["priority"] for each in requests]
        prompts = [_prompt(each) for each in requests]
        outputs = llm.generate(prompts, given, use_tqdm=False, priority=priority)
        outputs = [_plain(output.as_dict()) for output in outputs]
    else:
        outputs = list(_steps(llm.llm_engine, scenario))
    records = [json.loads(line) for line in trace.getvalue().splitlines()]
    metrics = {}
    for metric in llm.llm_engine.get_metrics():
        labels = [value for key, value in sorted(metric.labels.items()) if key != "model_name"]
        values = {each: getattr(metric, each, None) for each in ("value", "count", "sum")}
        if "_time" in metric.name or "_seconds" in metric.name:
            del values["value"], values["sum"]
        metrics[" ".join((metric.name, *labels))] = values
    return {"outputs": outputs, "events": records, "metrics": metrics}


def _steps(engine: Any, scenario: Json) -> Iterator[Any]:
    """Add and abort requests at their steps, and yield the outputs of each step."""
    from mie import MieError

    requests = dict(enumerate(scenario["requests"]))
    for step in range(2000):
        for number, request in [*requests.items()]:
            if request["step"] == step:
                del requests[number]
                try:
                    _add(engine, str(number), request)
                except MieError as error:
                    yield {"refused": type(error).__name__, "request": number}
        for at, number in scenario["aborts"]:
            if at == step:
                engine.abort_request([str(number)])
        if engine.has_unfinished_requests():
            yield [_plain(output.as_dict()) for output in engine.step()]
        elif not requests:
            return
    raise AssertionError("the requests do not end within 2000 steps")


def _add(engine: Any, request_id: str, request: Json) -> None:
    prompt, params, priority = _prompt(request), _params(request), request["priority"]
    if request["client"] is None:
        engine.add_request(request_id, prompt, params, priority=priority)
    else:
        options = {"request_id": request_id, "priority": priority, "client": request["client"]}
        engine.add(engine.prepare(prompt, params, **options))


def _params(request: Json) -> Any:
    from mie import RequestOutputKind, SamplingParams

    params = dict(request["params"])
    if "logit_bias" in params:
        params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
    return SamplingParams(output_kind=RequestOutputKind[request["output_kind"]], **params)


def _prompt(request: Json) -> Json:
    name = "prompt" if isinstance(request["prompt"], str) else "prompt_token_ids"
    return {name: request["prompt"], "cache_salt": request["salt"]}


def _plain(value: Any) -> Any:
    """Return nested values as JSON's, where a dataclass becomes a dictionary."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return [*map(_plain, value)] if isinstance(value, (list, tuple)) else value


# The parent: it compares.


def differences(old: Any, new: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """Yield the places where two results differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            if not LEFT_OUT.fullmatch(name):
                a, b = old.get(name, "absent"), new.get(name, "absent")
                yield from differences(a, b, tolerance, f"{path}.{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from differences(a, b, tolerance, f"{path}[{index}]")
    elif isinstance(old, float) and isinstance(new, float):
        if repr(old) != repr(new) and not abs(old - new) <= tolerance * max(1.0, abs(old)):
            yield f"{path}: {old!r}, {new!r}"
    elif old != new:
        yield f"{path}: {str(old)[:200]}, {str(new)[:200]}"


def is_commit(name: str) -> bool:
    """Return whether the repository of this script has the commit."""
    command = ["git", "rev-parse", "--quiet", "--verify", "--end-of-options", f"{name}^{{commit}}"]
    here = Path(__file__).parent
    return subprocess.run(command, cwd=here, capture_output=True, check=False).returncode == 0


@contextmanager
def checkout(name: str) -> Iterator[Path]:
    """Yield the directory of a checkout, or a temporary work tree of a commit."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", path, name], cwd=here, check=True
        )
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "-f", path], cwd=here, check=True)


def child(tree: Path, *arguments: str, scenarios: list[Json]) -> Iterator[Json]:
    """Yield the results of the scenarios in a process that imports the mie of a checkout."""
    paths = os.pathsep.join((str(tree), str(tree / "tests")))
    environment = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONHASHSEED"] = "0"  # a set of request ids has one order
    command = [sys.executable, __file__, *arguments]
    text = "".join(json.dumps(each) + "\n" for each in scenarios)
    with tempfile.TemporaryFile("w+") as file:
        file.write(text)
        file.seek(0)
        with subprocess.Popen(
            command, stdin=file, stdout=subprocess.PIPE, env=environment, cwd=tree, text=True
        ) as process:
            yield from map(json.loads, process.stdout or ())
        if process.returncode:
            raise SystemExit(f"the process of {tree} ended with {process.returncode}")


def main(argv: list[str]) -> int:
    """Compare two checkouts, and return 1 if a scenario differs."""
    parser = argparse.ArgumentParser(description="Compare two checkouts on random scenarios.")
    parser.add_argument("old", help="directory or commit")
    parser.add_argument("new", help="directory or commit")
    parser.add_argument("--scenarios", type=int, default=60, help="number of scenarios")
    parser.add_argument("--seed", type=int, default=0, help="seed of the scenarios")
    parser.add_argument("--only", type=int, help="number of one scenario to run and print")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="of floats, relative to values above 1"
    )
    options = parser.parse_args(argv)
    if options.scenarios < 1:
        parser.error(f"--scenarios is {options.scenarios}; compare at least 1")
    for name in (options.old, options.new):
        if not Path(name).is_dir() and not is_commit(name):
            parser.error(f"{name!r} is neither a directory nor a commit of this repository")
    numbers = range(options.scenarios) if options.only is None else [options.only]
    scenarios = [Draw(f"{options.seed}/{number}").scenario() for number in numbers]
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        trees = [stack.enter_context(checkout(each)) for each in (options.old, options.new)]
        [*child(trees[0], "--write-models", directory, scenarios=[])]
        results = [[*child(tree, "--run", directory, scenarios=scenarios)] for tree in trees]
    if options.only is not None:
        print(json.dumps(scenarios[0], indent=1))
    for number, scenario, old, new in zip(numbers, scenarios, *results, strict=True):
        backend = scenario["settings"]["backend"]
        words = f"{number} {backend} {scenario['kind']} {scenario['model']} {scenario['door']}"
        if "error" in old and old["error"] == new.get("error"):
            counts["the same error"] += 1
            print(f"{words}: {new['error']}: {new['message'][:90]}")
            continue
        found = [*differences(old, new, options.tolerance)]
        verdict = "different" if found else "close"
        if not any(differences(old, new, 0.0)):
            verdict = "equal"
        counts[f"{verdict} on {backend}"] += 1
        if "events" in new:
            counts["events"] += len(new["events"])
            counts.update(name for each in new["events"] if (name := each.get("event")) in COUNTED)
        for line in (f"{len(found)} differences", *found[:6]) if found else ():
            print(f"{words}: {line}")
    print(json.dumps(counts, indent=1))
    return 1 if any(name.startswith("different") for name in counts) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write-models"]:
        write_models(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--run"]:
        run_all(Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
