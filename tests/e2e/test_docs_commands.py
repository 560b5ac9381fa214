"""Run the commands and programs of README.md and docs/, page by page, with the bundled model."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import PATIENCE, run_warm, start

import mie.cli
from mie.cli.parser import ROWS

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted(ROOT.glob("docs/**/*.md")) if page.parent.name != "tutorial"),
]
PROGRAMS = {"mie", "python", ".venv/bin/python", "pip", "make", "curl", "git", "npm", "docker"} | {
    "export",
    ".",
    "sudo",
    "scripts/gpu_check",
    "vllm-router",
}

NOT_RUN = {
    r"^pip install|^npm |^docker |^sudo ": "needs the network, or a privilege",
    r"Qwen/": "fetches a model",
    r"[/\"]Qwen3-|\.gguf|\./4bit|--model MODEL|--models-dir|pip:": "needs a model that is not here",
    r"--backend cupy\b(?!-)|--b cupy\b|gpu_check|benchmark\.py gpu": "needs a GPU",
    r"^mie .*--replicas \d+( --r|$)|^vllm-router|^import mie\.ray": "needs Ray",
    r"^export|--host 0\.0\.0\.0": "opens the machine to its network",
    r"^make |^\. |^git (?!diff)|python -m (pytest|mypy|scripts)": "is for a checkout",
    r"^python scripts/(?!benchmark\.py$)|^mie sim cluster|^mie doctor --compile": "takes minutes",
    r"^mie learn check": "needs a learner's answer; test_learn.py runs it",
    r"^python (examples|docs/tutorial)/": "test_examples.py and test_tutorial.py run it",
    r"^python microserve\.py": "test_microserve.py runs it",
}
"""Expressions over the commands that are not run, and the reasons."""

SLOW = {"benchmarks", "diff", "disk_cache", "gpu/README", "gpu/jetson", "index", "kernels", "page"}
SLOW |= {"numerics", "quantisation", "serving", "simulator", "structured", "tracing"}

FILES = {
    "text.txt": "Once upon a time there was a fox.\n" * 8,
    "schema.json": json.dumps({"type": "object", "properties": {"age": {"type": "integer"}}}),
    "in.jsonl": json.dumps(
        {
            "custom_id": "one",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "Once", "max_tokens": 4},
        }
    ),
    "keys.txt": "alice a-long-random-key\n",
}
"""Files that the commands read."""


def steps(page: str) -> Iterator[str]:
    """Yield each command of a page in one line, and each block of Python in several."""
    language = ""
    program: list[str] = []
    for line in page.splitlines():
        if line.startswith("```"):
            if program:
                yield "\n".join(program) + "\n"
                program = []
            language = "" if language else line[3:] or "text"
        elif language == "python":
            program.append(line)
        elif language or line.startswith("    "):
            command = re.split(r" {2,}| # ", line.strip().removeprefix("$ "))[0]
            if command.split(" ")[0] in PROGRAMS or " | mie " in command:
                yield command


def is_run(step: str) -> bool:
    return not any(re.search(expression, step) for expression in NOT_RUN)


def words_of(command: str) -> list[str]:
    """Return the words of a command, or of the last one of a pipe."""
    return shlex.split(command.rpartition(" | ")[2])


STEPS = {
    str(page.relative_to(ROOT)): found
    for page in PAGES
    if (found := [*steps(page.read_text(encoding="utf-8"))])
}
EPILOGS = [
    step
    for row in ROWS.values()
    for step in steps("\n".join(f"    {line}" for line in row.get("epilog", [])))
]
COMMANDS = [step for found in [*STEPS.values(), EPILOGS] for step in found if "\n" not in step]


class Session:
    """A directory in which a page's commands run, and the server that it has started first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = "127.0.0.1:8000"
        self.server: subprocess.Popen[bytes] | None = None
        for name, text in FILES.items():
            (directory / name).write_text(text, encoding="utf-8")

    def run(self, step: str) -> None:
        """Run a step, and check its exit code."""
        text = re.sub(r"(127\.0\.0\.1|localhost):8000", self.address, step)
        process: subprocess.CompletedProcess[bytes]
        if "\n" in step:
            program = self.directory / "program.py"
            program.write_text(text, encoding="utf-8")
            process = run_warm(program, directory=self.directory)
        elif step.startswith("mie serve"):
            return self.serve(*words_of(text)[1:])
        else:
            first, *words = words_of(text)
            if first == "mie":
                process = run_warm(None, *words, stdin=b"Hello", directory=self.directory)
            else:
                executable = {"python": [sys.executable], "curl": ["curl", "--fail"]}[first]
                process = subprocess.run(
                    [*executable, *words], capture_output=True, cwd=ROOT, timeout=PATIENCE
                )
        assert process.returncode == 0, (step, process.stderr.decode())
        return None

    def serve(self, *words: str) -> None:
        """Start a server, and stop it if an earlier one is still there for the other commands."""
        server = start(*words, "--port", "0", cwd=self.directory)
        assert server.stderr is not None
        log = ""
        while not (found := re.search(r"http://(127\.0\.0\.1:\d+)", log)):
            line = server.stderr.readline().decode()
            assert line, (words, log)
            log += line
        if self.server is None:
            self.server, self.address = server, found[1]
        else:
            stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGTERM)
    _, errors = server.communicate(timeout=PATIENCE)
    assert server.returncode == 0, errors.decode()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name[5:].removesuffix(".md") in SLOW else [])
        for name, found in STEPS.items()
        if any(map(is_run, found))
    ],
)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    session = Session(tmp_path)
    try:
        for step in filter(is_run, STEPS[page]):
            session.run(step)
    finally:
        if session.server is not None:
            stop(session.server)


OF_SLOW_PAGES = {step for name in SLOW for step in STEPS[f"docs/{name}.md"] if "\n" not in step}


@pytest.mark.parametrize(
    "command", sorted({*COMMANDS} - {*filter(is_run, COMMANDS)} | OF_SLOW_PAGES)
)
def test_a_command_that_is_not_run_has_options_and_files_that_exist(command: str) -> None:
    first, *words = words_of(command)
    if first == "mie":
        mie.cli.new_parser(words).parse_args(words)
    for path in re.findall(r"(?:scripts|tests|docs|examples)/\S+", command):
        assert (ROOT / path).exists()


def test_every_reason_is_needed() -> None:
    found = [step for steps_of_page in STEPS.values() for step in steps_of_page]
    assert [each for each in NOT_RUN if not any(re.search(each, step) for step in found)] == []
    assert {f"docs/{name}.md" for name in SLOW} <= STEPS.keys()


def test_steps_are_found() -> None:
    page = """
    mie list    the models

```console
$ mie serve # begins
text
```

```python
import mie

print(mie)
```

    git diff | mie chat
"""
    program = "import mie\n\nprint(mie)\n"
    assert [*steps(page)] == ["mie list", "mie serve", program, "git diff | mie chat"]
