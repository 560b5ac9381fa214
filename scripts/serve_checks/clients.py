"""Clients that others wrote, each in the environment that has it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from serve_checks.server import RunningServer

HERE = Path(__file__).resolve().parent
CLIENTS = {
    "langchain": ("langchain_openai", "use_langchain.py"),
    "litellm": ("litellm", "use_litellm.py"),
    "lm-eval": ("lm_eval", "use_lm_eval.py"),
}
"""Map a name to the module that must be installed, and to the program."""

SECONDS = 1800


def run_clients(server: RunningServer, pythons: dict[str, str], max_examples: int) -> list[str]:
    """Run every client that is installed, and return the faults.

    ``pythons`` has the interpreters of clients that live in environments of their own.
    """
    wrong: list[str] = []
    for name, (module, program) in CLIENTS.items():
        python = pythons.get(name, sys.executable)
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
            print(f"{name}: skipped, because {python} has no {module}")
            continue
        command = [python, str(HERE / program), server.url, server.key]
        wrong += _run(name, command)
    python = pythons.get("schemathesis", sys.executable)
    if subprocess.run([python, "-c", "import schemathesis"], capture_output=True).returncode:
        print(f"schemathesis: skipped, because {python} has no schemathesis")
        return wrong
    command = [python, "-m", "schemathesis.cli"]
    command += ["--config-file", str(HERE / "schemathesis.toml"), "run"]
    command += [f"{server.url}/openapi.json", "--checks", "all", "--no-color", "--seed", "1"]
    command += ["--max-examples", str(max_examples)]
    command += ["--request-timeout", "120", "--max-response-time", "120"]  # no checks of speed
    command += ["-H", f"Authorization: Bearer {server.key}"]
    return wrong + _run("schemathesis", command)


def _run(name: str, command: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:  # schemathesis leaves a cache where it runs
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=directory,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # it would ask GitHub
        )
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    print(f"{name}: {'ok' if result.returncode == 0 else 'failed'}")
    for line in lines[-4:] if result.returncode == 0 else lines[-60:]:
        print(f"    {line}")
    return [] if result.returncode == 0 else [f"{name} ended with exit code {result.returncode}"]
