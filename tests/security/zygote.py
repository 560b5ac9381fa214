"""Runs hostile cases in children of one warm process, and measures each.

`measured.Zygote` starts this program. It has imported everything that the cases use, so a child
costs a fork. Each line of its standard input is a case ``[action, *arguments]``, and each line of
its standard output says what became of it.
"""

from __future__ import annotations

import contextlib
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
import mie.sim.book
import mie.sim.calibrate
import mie.sim.driver
import mie.sim.recorded
import mie.sim.simulated
from mie import LLM, SamplingParams
from mie.checkpoint.config import ModelConfig
from mie.checkpoint.tensors import expected_tensors
from mie.checkpoint.weights import Checkpoint
from mie.errors import MieError
from mie.text.chat import ChatTemplate
from mie.text.tokenizer import Tokenizer

MAX_CPU_SECONDS = 20
MAX_MORE_ADDRESSES = 3 << 30
MAX_WALL_SECONDS = 60
"""These keep a failing case from taking the machine down. The tests' own limits are lower."""
MAX_TEXT = 20_000


# What a case can do.


def cli(*arguments: str) -> dict[str, Any]:
    """Return a command line."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = mie.cli.main(arguments)
    return {"code": code, "stdout": output.getvalue(), "stderr": errors.getvalue()}


def config(directory: str) -> dict[str, Any]:
    """Reads the configuration."""
    model = ModelConfig.load(Path(directory))
    return {"stdout": f"{model.num_parameters} {model.context_length}"}


def weights(directory: str) -> dict[str, Any]:
    """Opens the weights, and reads no data."""
    model = ModelConfig.load(Path(directory))
    Checkpoint.open(Path(directory), expected_tensors(model)).close()
    return {}


def generate(directory: str) -> dict[str, Any]:
    """Loads a model without its tokenizer, and generates three tokens."""
    llm = LLM(directory, skip_tokenizer_init=True, num_blocks=4)
    [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, seed=1), use_tqdm=False)
    return {"stdout": str(output.outputs[0].token_ids)}


def tokenizer(directory: str) -> dict[str, Any]:
    """Loads a tokenizer, and encodes a word and decodes it."""
    loaded = Tokenizer.load(Path(directory), None)
    return {"stdout": loaded.decode(loaded.encode("Hello"))}


def encode(directory: str, text: str) -> dict[str, Any]:
    """Loads a tokenizer, and counts the tokens of a text."""
    return {"stdout": str(len(Tokenizer.load(Path(directory), None).encode(text)))}


def render(template: str) -> dict[str, Any]:
    """Renders a chat template, of whose text 80 characters are enough."""
    text = ChatTemplate(template).render([{"role": "user", "content": "hello"}])
    return {"stdout": text[:80]}


def content_format(template: str) -> dict[str, Any]:
    """Finds out what a template takes as content."""
    return {"stdout": ChatTemplate(template).content_format}


def call(name: str, *arguments: Any) -> dict[str, Any]:
    """Calls ``module:function``; the module lies beside this file, or can be imported."""
    module, _, function = name.partition(":")
    return {"stdout": str(getattr(importlib.import_module(module), function)(*arguments))}


ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (
        *(cli, config, weights, generate, tokenizer, encode, render, content_format, call),
    )
}


# Measuring.


def main() -> None:
    hostile_requests.llm()  # which every child has then
    gc.freeze()  # so that a child collects its own garbage only
    for line in sys.stdin:
        print(json.dumps(measured(json.loads(line))), flush=True)


def status_bytes(name: str) -> int:
    """Return a line of this process's status, which Linux gives in kilobytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def measured(case: list[Any]) -> dict[str, Any]:
    """Return what a case did in a child, its CPU seconds, and its peak memory above the idle
    child's."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        idle = status_bytes("VmRSS")  # without pages of files that only the parent has mapped
        try:
            outcome = attempted(case)
            gc.collect()  # which ends the process of the templates, so that its cost is counted
            own, others = peak_bytes(resource.RUSAGE_SELF), peak_bytes(resource.RUSAGE_CHILDREN)
            outcome["peak_bytes"] = max(0, own - idle) + others
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


def peak_bytes(who: int) -> int:
    """Return the peak memory of this process, or of the largest one that it has waited for."""
    return 1024 * resource.getrusage(who).ru_maxrss


def everything(reader: int) -> tuple[str, bool]:
    """Return what is written to the pipe until its end, and whether that does not come."""
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
    """Return what came of a case: what it printed, or the error that it raised."""
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
    sys.path.insert(0, str(Path(__file__).parent))
    main()
