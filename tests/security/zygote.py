"""Run hostile cases in children of one warm process, and measure each.

`measured.Zygote` starts this program. It has imported everything that the cases use, so a child
costs only a fork. Each line of its standard input is a case ``[action, *arguments]``, and each line
of its standard output is the outcome.
"""

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_requests

import mie.cli.inspect
import mie.cli.sim
import mie.cli.trace
import mie.lab.sim.driver
import mie.lab.sim.simulated
from mie import LLM, SamplingParams
from mie.checkpoint.config import load_model_config
from mie.checkpoint.tensors import expected_tensors, num_parameters
from mie.checkpoint.weights import Checkpoint
from mie.errors import MieError
from mie.ops_jit.environment import CannotRun
from mie.ops_jit.kernel_cache import WEIGHT_DTYPES, Kernels, kernel_names
from mie.text.chat import ChatTemplate
from mie.text.tokenizer import Tokenizer

MAX_CPU_SECONDS = 20
MAX_MORE_ADDRESSES = 3 << 30
MAX_WALL_SECONDS = 240
"""Limits that keep a failing case from exhausting the machine. The limits of the tests are lower.
"""
MAX_TEXT = 20_000


# The actions of a case.


def cli(*arguments: str) -> dict[str, Any]:
    """Run a command line."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = mie.cli.main(arguments)
    return {"code": code, "stdout": output.getvalue(), "stderr": errors.getvalue()}


def cli_each(*commands: list[str]) -> dict[str, Any]:
    """Run command lines one after the other, and measure the CPU time of each."""
    outcomes = []
    for command in commands:
        before = cpu_seconds()
        outcome = cli(*command)
        texts = {name: outcome[name][:MAX_TEXT] for name in ("stdout", "stderr")}
        outcomes.append({**outcome, **texts, "cpu_seconds": cpu_seconds() - before})
    return {"outcomes": outcomes}


def config(directory: str) -> dict[str, Any]:
    """Read the configuration."""
    model = load_model_config(Path(directory))
    return {"stdout": f"{num_parameters(model)} {model.context_length}"}


def weights(directory: str) -> dict[str, Any]:
    """Open the weights without reading data."""
    model = load_model_config(Path(directory))
    Checkpoint.open(Path(directory), expected_tensors(model), model.quantisation).close()
    return {}


def generate(directory: str) -> dict[str, Any]:
    """Load a model without its tokenizer, and generate three tokens."""
    llm = LLM(directory, skip_tokenizer_init=True, num_blocks=4)
    [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, seed=1), use_tqdm=False)
    return {"stdout": str(output.outputs[0].token_ids)}


def tokenizer(directory: str) -> dict[str, Any]:
    """Load a tokenizer, encode a word and decode it."""
    loaded = Tokenizer.load(Path(directory), None)
    return {"stdout": loaded.decode(loaded.encode("Hello"))}


def encode(directory: str, text: str) -> dict[str, Any]:
    """Load a tokenizer, and count the tokens of a text."""
    return {"stdout": str(len(Tokenizer.load(Path(directory), None).encode(text)))}


def render(template: str) -> dict[str, Any]:
    """Render a chat template, and return the first 80 characters."""
    text = ChatTemplate(template).render([{"role": "user", "content": "hello"}])
    return {"stdout": text[:80]}


def content_format(template: str) -> dict[str, Any]:
    """Find out which content format a template expects."""
    return {"stdout": ChatTemplate(template).content_format}


def call(name: str, *arguments: Any) -> dict[str, Any]:
    """Call ``module:function``. The module is beside this file, or can be imported."""
    module, _, function = name.partition(":")
    return {"stdout": str(getattr(importlib.import_module(module), function)(*arguments))}


FUNCTIONS: list[Callable[..., dict[str, Any]]] = [cli, cli_each, config, weights, generate]
FUNCTIONS += [tokenizer, encode, render, content_format, call]
ACTIONS = {each.__name__: each for each in FUNCTIONS}


# Measuring.


def compile_kernels() -> None:
    """Compile the kernels that models of the cases need, which takes seconds of a child's time."""
    with contextlib.suppress(CannotRun):
        progress = lambda number: contextlib.nullcontext(lambda count: None)  # noqa: E731
        Kernels().prepare(kernel_names(WEIGHT_DTYPES, ["float32"]), progress)


def main() -> None:
    compile_kernels()
    hostile_requests.llm()  # Every child then has it.
    gc.freeze()  # So a child collects only its own garbage.
    for line in sys.stdin:
        case = json.loads(line)
        if case[0] == "call":
            warm_up(case[1].partition(":")[0])
        print(json.dumps(measured(case)), flush=True)


@functools.cache
def warm_up(module: str) -> None:
    """Import a module of cases, so that every child has it and its imports."""
    getattr(importlib.import_module(module), "warm_up", lambda: None)()
    gc.freeze()


def status_bytes(name: str) -> int:
    """Return a value of this process's status in bytes; Linux gives kilobytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def measured(case: list[Any]) -> dict[str, Any]:
    """Return the outcome of a case in a child, its CPU seconds, and its peak memory.

    The memory is the growth of the child, and that of its largest worker process. Linux counts
    pages that a worker has before it executes its program, which are those of the child.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        idle = status_bytes("VmRSS")  # without file pages that only the parent has mapped
        try:
            outcome = attempted(case)
            gc.collect()  # ends the template worker, so that its cost is counted
            peaks = map(peak_bytes, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            outcome["peak_bytes"] = sum(max(0, peak - idle) for peak in peaks)
            with os.fdopen(writer, "w") as file:
                json.dump(outcome, file)
        finally:
            os._exit(0)
    os.close(writer)
    text, is_hung = everything(reader)
    if is_hung:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    outcome = json.loads(text) if text else {"error": "killed", "message": f"status {status}"}
    if is_hung:
        outcome = {"error": "hung", "message": f"no end after {MAX_WALL_SECONDS} s"}
    outcome["cpu_seconds"] = usage.ru_utime + usage.ru_stime
    outcome.setdefault("peak_bytes", 1024 * usage.ru_maxrss)
    return outcome


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_bytes(who: int) -> int:
    """Return the peak memory of this process or of its largest finished child."""
    return 1024 * resource.getrusage(who).ru_maxrss


def everything(reader: int) -> tuple[str, bool]:
    """Return everything that is written to the pipe, and whether its end did not arrive."""
    text = b""
    while select.select([reader], [], [], MAX_WALL_SECONDS)[0]:
        more = os.read(reader, 1 << 16)
        if not more:
            os.close(reader)
            return text.decode(), False
        text += more
    os.close(reader)
    return "", True


def attempted(case: list[Any]) -> dict[str, Any]:
    """Return the outcome of a case: its output, or the error that it raised."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    addresses = status_bytes("VmSize") + MAX_MORE_ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
    action, *arguments = case
    try:
        outcome = ACTIONS[action](*arguments)
    except BaseException as error:
        return {
            "error": type(error).__name__,
            "is_ours": isinstance(error, MieError),
            "message": str(error)[:MAX_TEXT],
            "traceback": "".join(traceback.format_exception(error))[-MAX_TEXT:],
        }
    return {
        name: value[:MAX_TEXT] if isinstance(value, str) else value
        for name, value in outcome.items()
    }


if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:2]]
    main()
