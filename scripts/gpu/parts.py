"""Define the parts of the check. Each gets the run and its seconds, and starts processes."""

from __future__ import annotations

import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.run import SCRIPTS, Done, Outcome, Run, how_it_ended
from mie.base.resources import available_bytes, usable_cpus

MOST_WORKERS = 14
"""Maximum number of processes of tests. NVRTC takes most of their time."""
WORKER_BYTES = 3 << 29
"""Memory for each process of tests, with its CUDA context. A Jetson has 8 GB for both. Assumed."""
KERNEL_TESTS = (
    *("kernels", "few_rows", "quantised_products", "sampling", "cublas", "graphs"),
    *("int4_kernels", "adapter_kernels", "lora_engines"),
    *("expert_kernels", "recurrent_kernels", "sinks", "cupy_integers"),
    *("nonfinite", "bfloat16_range", "whole_step_invariance"),
)
"""The files of tests/kernels with cases that also run on a device."""
SANITIZERS = ("memcheck", "racecheck", "synccheck")
SANITIZER_EXIT_CODE = 86
SMI_QUERY = (
    "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,"
    "temperature.gpu,power.draw"
)


def environment(run: Run, seconds: float) -> Outcome:
    """Describe the device as CuPy and nvidia-smi see it."""
    done = run.execute(run.child("environment"), seconds)
    if done.exit_code != 0:
        return Outcome(status="failed", reason=done.last_line)
    details = json.loads(done.last_line)
    details["nvidia_smi"] = nvidia_smi(run)
    if shutil.which("nvpmodel"):  # a Jetson: the power mode sets the clocks of the memory
        details["power_mode"] = one_line(run.execute(["nvpmodel", "-q"], 20))
    return Outcome(status="passed", details=details)


def nvidia_smi(run: Run) -> str:
    """Return clocks and more as one line, or a line about the missing tool."""
    if run.is_dry_run or not shutil.which("nvidia-smi"):
        return "not run" if run.is_dry_run else "nvidia-smi is not installed"
    return one_line(run.execute(["nvidia-smi", f"--query-gpu={SMI_QUERY}", "--format=csv"], 20))


def one_line(done: Done) -> str:
    """Return all lines that a process printed as one."""
    return "; ".join(done.output.strip().splitlines())


def golden_vectors(run: Run, seconds: float) -> Outcome:
    """Compare every PTX wrapper, and the rest of the dialect, with numbers from NumPy."""
    selected = "forward and mma" if run.is_dry_run else "cupy and not emulated"
    return run_pytest(run, "golden", ["tests/kernels/test_emulator.py"], selected, seconds)


def parity(run: Run, seconds: float) -> Outcome:
    """Compare every kernel and operator of the backend with the NumPy operators in float64."""
    kernels = [f"tests/kernels/test_{name}.py" for name in KERNEL_TESTS]
    operators = ("backend_contract", "recurrent_operators")
    files = [*kernels, *(f"tests/parity/test_{name}.py" for name in operators)]
    selected = "(cupy and not emulated) or side_by_side"
    if run.is_dry_run:
        selected = "silu_mul and (forward or emulated)"
    return run_pytest(run, "parity", files, selected, seconds)


def end_to_end(run: Run, seconds: float) -> Outcome:
    """Run the bundled model, and judge each token by NumPy's log-probabilities."""
    fault = "too far from NumPy's log-probabilities"
    return outcome_of_child(run, "end-to-end", "is_right", fault, seconds)


def graphs(run: Run, seconds: float) -> Outcome:
    """Compare captured steps with eager ones, bit for bit."""
    return outcome_of_child(run, "graphs", "is_equal", "other bits than eager", seconds)


def outcome_of_child(run: Run, child: str, key: str, fault: str, seconds: float) -> Outcome:
    """Run a child that prints a verdict for each dtype under ``key``, and report false ones."""
    done = run.execute(run.child(child), seconds)
    if done.exit_code != 0:
        return Outcome(status="failed", reason=how_it_ended(done, seconds))
    details = json.loads(done.last_line)
    wrong = [name for name, is_good in details[key].items() if not is_good]
    reason = f"{fault}: {', '.join(wrong)}" if wrong else ""
    return Outcome(status="failed" if wrong else "passed", reason=reason, details=details)


def sanitizers(run: Run, seconds: float) -> Outcome:
    """Run compute-sanitizer over the kernels' tests in float16. Their shapes are tiny."""
    if not run.is_dry_run and not shutil.which("compute-sanitizer"):
        return Outcome(status="skipped", reason="compute-sanitizer is not installed")
    verdicts = {tool: sanitize(run, tool, seconds / len(SANITIZERS)) for tool in SANITIZERS}
    bad = [f"{tool}: {verdict}" for tool, verdict in verdicts.items() if verdict != "clean"]
    is_faulty = any("time was up" not in each for each in bad)
    status = "failed" if is_faulty else "skipped" if len(bad) == len(SANITIZERS) else "passed"
    return Outcome(status=status, reason="; ".join(bad), details=dict(verdicts))


def sanitize(run: Run, tool: str, seconds: float) -> str:
    """Return "clean", or the verdict of one tool on the tests."""
    command: list[str | Path] = [*run.child("sanitized"), "--tool", tool]
    if not run.is_dry_run:
        options = ["--tool", tool, "--error-exitcode", str(SANITIZER_EXIT_CODE)]
        command[:0] = ["compute-sanitizer", *options]
    done = run.execute(command, seconds, {} if run.is_dry_run else {"MIE_GPU_TESTS": "1"})
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", done.output)
    if done.exit_code == 0:
        return "clean"
    if done.exit_code == SANITIZER_EXIT_CODE and summary:
        return str(summary[-1])
    return how_it_ended(done, seconds)


DIFFS: Mapping[str, Sequence[str]] = {
    "float32": ("--dtype-b", "float32"),
    "float32, each operator alone": ("--dtype-b", "float32", "--isolate"),
    "float16": ("--dtype-b", "float16"),
    "bfloat16": ("--dtype-b", "bfloat16"),
    **{
        f"{name} cache": ("--kv-cache-dtype-a", name, "--kv-cache-dtype-b", name)
        for name in ("int8", "fp8", "int4")
    },
}
"""The arguments of each `mie diff`. Side A is numpy in float32."""


def diff(run: Run, seconds: float) -> Outcome:
    """Run `mie diff` of the plain NumPy operators and the device."""
    backend, names = ("cupy", list(DIFFS))
    if run.is_dry_run:
        backend, names = "cupy-emulated", names[:1]
    verdicts, each = {}, seconds / len(names)
    for name in names:
        command = [sys.executable, "-m", "mie", "diff", "--b", backend, *DIFFS[name]]
        done = run.execute(command, each)
        is_within = done.exit_code == 0
        verdicts[name] = "within tolerance" if is_within else how_it_ended(done, each)
    bad = [f"{name}: {said}" for name, said in verdicts.items() if said != "within tolerance"]
    return Outcome(status="failed" if bad else "passed", reason="; ".join(bad), details=verdicts)


def arrivals(run: Run, seconds: float) -> Outcome:
    """Run scripts/benchmark.py arrivals, with captured steps and without."""
    prefix = run.directory / "arrivals"
    script = SCRIPTS / "benchmark.py"
    command: list[str | Path] = [sys.executable, script, "arrivals", "--output", prefix]
    command += ["--compare", "enforce_eager=True", "--rounds", "1"]
    if run.is_dry_run:
        command += ["--backend", "cupy-emulated", "--model", "toy", "--requests", "3"]
        command += ["--rates", "100", "--max-model-len", "16"]
    else:
        command += ["--backend", "cupy", "--model", "TinyLlama-1.1B", "--requests", "200"]
        command += ["--rates", "20", "80", "--max-model-len", "1024", "--set", "dtype=float16"]
    done = run.execute(command, seconds)
    results = Path(f"{prefix}.json")
    details = json.loads(results.read_text()) if results.exists() else {}
    if done.exit_code == 0:
        return Outcome(status="passed", details=details)
    return Outcome(status="failed", reason=how_it_ended(done, seconds), details=details)


def benchmark(run: Run, seconds: float) -> Outcome:
    """Run scripts/benchmark.py gpu. Rows measured before its time limit count."""
    prefix = run.directory / "bench"
    script = SCRIPTS / "benchmark.py"
    command: list[str | Path] = [sys.executable, script, "gpu", "--output", prefix]
    command += ["--seconds", str(max(1.0, seconds - 20))]  # its last row may take longer
    done = run.execute([*command, *(["--dry-run"] if run.is_dry_run else [])], seconds)
    results = Path(f"{prefix}.json")
    details = json.loads(results.read_text()) if results.exists() else {}
    if done.exit_code == 0:
        return Outcome(status="passed", details=details)
    reason = "; ".join(details.get("failures", [])) or how_it_ended(done, seconds)
    return Outcome(status="failed", reason=reason, details=details)


def run_pytest(run: Run, name: str, files: Sequence[str], selected: str, seconds: float) -> Outcome:
    """Run tests by name and count them from their JUnit file."""
    report = run.directory / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", *files, "-k", selected, "-q", f"--junitxml={report}"]
    # A machine's own versions of packages may warn, and it may lack plugins that pyproject.toml
    # configures. Neither says anything about the hardware.
    command += ["-W", "default", "-o", "addopts=", "-p", "no:cacheprovider"]
    if find_spec("xdist") is not None and not run.is_dry_run:
        command += ["-n", str(num_workers(usable_cpus(), available_bytes()))]
    env = {} if run.is_dry_run else {"MIE_GPU_TESTS": "1"}
    done = run.execute(command, seconds, env)
    if not report.exists():
        return Outcome(status="failed", reason=how_it_ended(done, seconds))
    details = junit_counts(report)
    report.unlink()  # the log and the counts say it all
    is_good = done.exit_code == 0 and details["passed"] > 0
    reason = "" if is_good else f"{done.last_line[:300]}"
    return Outcome(status="passed" if is_good else "failed", reason=reason, details=details)


def num_workers(num_cpus: int, num_bytes: int) -> int:
    """Return how many processes of tests fit the CPUs and the memory, at least one."""
    return max(1, min(num_cpus, num_bytes // WORKER_BYTES, MOST_WORKERS))


def junit_counts(path: Path) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, and how the failures begin."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for case in cases:
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts["failed"] += 1
            counts["failures"].append(f"{case.get('name')}: {failure_line(case)}")
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return counts


def failure_line(case: ElementTree.Element) -> str:
    """Return the first line of a test's failure."""
    for child in case:
        if child.tag in ("failure", "error"):
            return (child.get("message") or "").split("\n")[0][:200]
    return ""


Part = Callable[[Run, float], Outcome]
PARTS: Mapping[str, tuple[Part, float]] = {
    "environment": (environment, 60),
    "golden vectors": (golden_vectors, 70),
    "parity": (parity, 150),
    "end to end": (end_to_end, 60),
    "graphs": (graphs, 40),
    "compute-sanitizer": (sanitizers, 100),
    "mie diff": (diff, 60),
    "arrivals": (arrivals, 90),
    "benchmark": (benchmark, 300),
}
"""Each part with its time limit in seconds, in the order in which they run."""
