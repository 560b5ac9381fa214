#!/usr/bin/env python
"""Check and measure the GPU path on a machine with a GPU: one command, under nine minutes.

    python scripts/gpu_check.py --output DIR [--commit HASH] [--seconds 530] [--only PART ...]
    python scripts/gpu_check.py --dry-run        the same way through on the emulator, tiny

Each part runs in processes of its own, with a time limit; a part that the total leaves no time for
is skipped by name. After every part DIR holds all results so far: gpu_check.json, gpu_check.md (a
page for docs/gpu/) and gpu_check.log (what the processes printed); the benchmark adds bench.json
and bench.md. Needs mie's dependencies, CuPy and pytest; mie itself is taken from this checkout.

Exit codes: 0 nothing failed, 1 a part failed, 2 there is no CuPy or no device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOTAL_SECONDS = 530.0
MIN_SECONDS = 5.0
"""A part with less time than this is not begun."""
PYTEST_WORKERS = 4
"""Several, since most of a test's time is NVRTC's."""
SANITIZERS = ("memcheck", "racecheck", "synccheck")
SANITIZER_EXIT_CODE = 86
SMI_QUERY = (
    "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,"
    "temperature.gpu,power.draw"
)


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a process ended; without an exit code its time was up."""

    exit_code: int | None
    output: str

    @property
    def last_line(self) -> str:
        """The last line that it printed."""
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else "no output"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a part found: "passed", "failed" or "skipped", and why."""

    status: str
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where the parts run, and how."""

    directory: Path
    is_dry_run: bool

    def execute(
        self, command: Sequence[str | Path], seconds: float, env: Mapping[str, str] | None = None
    ) -> Done:
        """Run a command from the repository's root; it and its children end within the time."""
        words = list(map(str, command))
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
            done = Done(exit_code=process.returncode, output=output)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            done = Done(exit_code=None, output=process.communicate()[0])
        with (self.directory / "gpu_check.log").open("a") as log:
            log.write(f"$ {' '.join(words)}\n{done.output}\nexit code: {done.exit_code}\n\n")
        return done

    def child(self, name: str) -> list[str | Path]:
        """The command of one of this script's own children."""
        dry_run = ["--dry-run"] if self.is_dry_run else []
        return [sys.executable, Path(__file__).resolve(), "--child", name, *dry_run]


def python_path() -> str:
    """This checkout first."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


# The parts. Each gets the run and its seconds.


def environment(run: Run, seconds: float) -> Outcome:
    """The device as CuPy and nvidia-smi see it."""
    done = run.execute(run.child("environment"), seconds)
    if done.exit_code != 0:
        return Outcome(status="failed", reason=done.last_line)
    details = json.loads(done.last_line)
    details["nvidia_smi"] = nvidia_smi(run)
    return Outcome(status="passed", details=details)


def nvidia_smi(run: Run) -> str:
    """Clocks and more as one line; says so where the tool is missing."""
    if run.is_dry_run or not shutil.which("nvidia-smi"):
        return "not run" if run.is_dry_run else "nvidia-smi is not installed"
    done = run.execute(["nvidia-smi", f"--query-gpu={SMI_QUERY}", "--format=csv"], 20)
    return "; ".join(done.output.strip().splitlines())


def golden_vectors(run: Run, seconds: float) -> Outcome:
    """Every PTX wrapper, and the rest of the dialect, against numbers worked out by NumPy."""
    selected = "forward and mma" if run.is_dry_run else "cupy and not emulated"
    return run_pytest(run, "golden", ["tests/kernels/test_emulator.py"], selected, seconds)


def parity(run: Run, seconds: float) -> Outcome:
    """Every kernel and every operator of the backend against the NumPy operators in float64."""
    kernels = [f"tests/kernels/test_{name}.py" for name in ("kernels", "sampling")]
    files = [*kernels, "tests/parity/test_backend_contract.py"]
    files = [file for file in files if (ROOT / file).exists()]
    selected = "(cupy and not emulated) or side_by_side"
    if run.is_dry_run:
        selected = "silu_mul and (forward or emulated)"
    return run_pytest(run, "parity", files, selected, seconds)


def end_to_end(run: Run, seconds: float) -> Outcome:
    """The bundled model through the engine: float32 gives NumPy's tokens, float16 runs."""
    done = run.execute(run.child("end-to-end"), seconds)
    if done.exit_code != 0:
        return Outcome(status="failed", reason=how_it_ended(done, seconds))
    details = json.loads(done.last_line)
    wrong = [name for name, is_right in details["is_right"].items() if not is_right]
    return Outcome(
        status="failed" if wrong else "passed",
        reason=f"other tokens than expected: {', '.join(wrong)}" if wrong else "",
        details=details,
    )


def sanitizers(run: Run, seconds: float) -> Outcome:
    """compute-sanitizer over the kernels' tests in float16, whose shapes are tiny."""
    if not run.is_dry_run and not shutil.which("compute-sanitizer"):
        return Outcome(status="skipped", reason="compute-sanitizer is not installed")
    verdicts = {tool: sanitize(run, tool, seconds / len(SANITIZERS)) for tool in SANITIZERS}
    bad = [f"{tool}: {verdict}" for tool, verdict in verdicts.items() if verdict != "clean"]
    is_faulty = any("time was up" not in each for each in bad)
    status = "failed" if is_faulty else "skipped" if len(bad) == len(SANITIZERS) else "passed"
    return Outcome(status=status, reason="; ".join(bad), details=dict(verdicts))


def sanitize(run: Run, tool: str, seconds: float) -> str:
    """ "clean", or what one tool says of the tests."""
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


DIFF_DTYPES = ("float32", "float16", "bfloat16")


def diff(run: Run, seconds: float) -> Outcome:
    """`mie diff` of NumPy in float32 and the device in every dtype."""
    command = [sys.executable, "-m", "mie", "diff"]
    if run.execute([*command, "--help"], seconds).exit_code != 0:
        return Outcome(status="skipped", reason="this mie has no command diff")
    backend, dtypes = (
        ("cupy-emulated", DIFF_DTYPES[:1]) if run.is_dry_run else ("cupy", DIFF_DTYPES)
    )
    verdicts = {}
    for dtype in dtypes:
        each = seconds / len(dtypes)
        done = run.execute([*command, "--b", backend, "--dtype-b", dtype], each)
        is_within = done.exit_code == 0
        verdicts[dtype] = "within tolerance" if is_within else how_it_ended(done, each)
    bad = [f"{name}: {said}" for name, said in verdicts.items() if said != "within tolerance"]
    return Outcome(status="failed" if bad else "passed", reason="; ".join(bad), details=verdicts)


def benchmark(run: Run, seconds: float) -> Outcome:
    """scripts/bench_gpu.py; what it measured until its time was up counts."""
    prefix = run.directory / "bench"
    script = ROOT / "scripts" / "bench_gpu.py"
    command: list[str | Path] = [sys.executable, script, "--output", prefix]
    command += ["--seconds", str(max(1.0, seconds - 20))]  # its last row may take longer
    done = run.execute([*command, *(["--dry-run"] if run.is_dry_run else [])], seconds)
    results = Path(f"{prefix}.json")
    details = json.loads(results.read_text()) if results.exists() else {}
    if done.exit_code == 0:
        return Outcome(status="passed", details=details)
    reason = "; ".join(details.get("failures", [])) or how_it_ended(done, seconds)
    return Outcome(status="failed", reason=reason, details=details)


def how_it_ended(done: Done, seconds: float) -> str:
    """A process that did not end well, in one line."""
    if done.exit_code is None:
        return f"its time was up ({seconds:.0f} s)"
    return f"exit code {done.exit_code}: {done.last_line[:300]}"


def run_pytest(run: Run, name: str, files: Sequence[str], selected: str, seconds: float) -> Outcome:
    """Tests by name, counted from their JUnit file."""
    report = run.directory / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", *files, "-k", selected, "-q", f"--junitxml={report}"]
    # A machine's own versions of packages may warn, and it may lack plugins that pyproject.toml
    # configures: neither says anything about the hardware.
    command += ["-W", "default", "-o", "addopts=", "-p", "no:cacheprovider"]
    if find_spec("xdist") is not None and not run.is_dry_run:
        command += ["-n", str(PYTEST_WORKERS)]
    env = {} if run.is_dry_run else {"MIE_GPU_TESTS": "1"}
    done = run.execute(command, seconds, env)
    if not report.exists():
        return Outcome(status="failed", reason=how_it_ended(done, seconds))
    details = junit_counts(report)
    report.unlink()  # the log and the counts say it all
    is_good = done.exit_code == 0 and details["passed"] > 0
    reason = "" if is_good else f"{done.last_line[:300]}"
    return Outcome(status="passed" if is_good else "failed", reason=reason, details=details)


def junit_counts(path: Path) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, and the first words of the failures."""
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
    """The first line of a test's failure."""
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
    "compute-sanitizer": (sanitizers, 120),
    "mie diff": (diff, 45),
    "benchmark": (benchmark, 240),
}
"""Each with the seconds that it may take at most, in the order in which they run."""


# The children.


def child_environment(is_dry_run: bool) -> dict[str, Any]:
    """What the figures hold for. Raises MieError where there is no CuPy or no device."""
    import numpy as np

    state: dict[str, Any] = {"python": platform.python_version(), "numpy": np.__version__}
    state |= {name: installed_version(name) for name in ("torch", "transformers", "ml_dtypes")}
    if is_dry_run:
        return {**state, "device": "none (dry run)"}
    from mie.ops_gpu.launcher import CupyLauncher

    cupy: Any = CupyLauncher().xp
    runtime, device = cupy.cuda.runtime, cupy.cuda.Device()
    properties = runtime.getDeviceProperties(device.id)
    free, total = runtime.memGetInfo()
    return {
        **state,
        "device": properties["name"].decode(),
        "compute_capability": device.compute_capability,
        "cupy": cupy.__version__,
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "nvrtc": list(cupy.cuda.nvrtc.getVersion()),
        "num_multiprocessors": properties["multiProcessorCount"],
        "l2_bytes": properties["l2CacheSize"],
        "memory_bytes": total,
        "free_bytes": free,
    }


def installed_version(name: str) -> str:
    """A package's version, without importing it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


STORY = "Tell me a story about Mia the otter, the mill and a bell."


def child_end_to_end(is_dry_run: bool) -> dict[str, Any]:
    """Whether the tokens are right: equal to NumPy's in float32, as many in 16 bits."""
    backend, num_tokens = ("cupy-emulated", 6) if is_dry_run else ("cupy", 48)
    wanted = tokens_of("numpy", "float32", num_tokens)
    same = tokens_of(backend, "float32", num_tokens)
    is_right, agreeing = {"float32": same == wanted}, {}
    for dtype in ("float16", "bfloat16"):
        got = tokens_of(backend, dtype, num_tokens)
        is_right[dtype] = [len(each) for each in got] == [len(each) for each in wanted]
        pairs = [pair for a, b in zip(got, wanted, strict=True) for pair in zip(a, b, strict=False)]
        agreeing[dtype] = sum(a == b for a, b in pairs) / len(pairs)
    return {"num_tokens": sum(map(len, wanted)), "is_right": is_right, "share_as_numpy": agreeing}


def tokens_of(backend: str, dtype: str, num_tokens: int) -> list[list[int]]:
    """Greedy tokens of three requests in few blocks: chunks, prefix hits, preemptions that swap."""
    from mie import LLM, SamplingParams

    llm = LLM(
        "bundled",
        backend=backend,
        dtype=dtype,
        block_size=8,
        num_blocks=14,
        max_num_batched_tokens=16,
        preemption_mode="swap",
        swap_space=1 << 20,
    )
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    first = llm.generate([STORY], params, use_tqdm=False)
    others = llm.generate(["Once upon a time", "Tom the owl", STORY], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in [*first, *others]]


def child_sanitized(tool: str, is_dry_run: bool) -> int:
    """pytest's exit code, in this process: the sanitizer watches it."""
    import pytest

    selected = "cupy and float16 and not bfloat16"
    if tool != "memcheck":  # the kernels that share memory or wait for each other
        selected += " and (paged or long or rms_norm or argmax or sample)"
    if is_dry_run:
        selected = "checked and rms_norm and float16 and not bfloat16"
    else:
        import cupy

        cupy.cuda.set_allocator(None)  # the pool would hide an access past an array's end
    file = str(ROOT / "tests" / "kernels" / "test_kernels.py")
    options = ["-q", "-W", "default", "-o", "addopts=", "-o", "timeout=0", "-p", "no:cacheprovider"]
    return int(pytest.main([file, "-k", selected, *options]))


def run_child(args: argparse.Namespace) -> int:
    """One of the children's ways: its exit code."""
    if args.child == "sanitized":
        return child_sanitized(args.tool, args.dry_run)
    from mie.errors import MieError

    work = child_environment if args.child == "environment" else child_end_to_end
    try:
        print(json.dumps(work(args.dry_run)))
    except MieError as error:
        print(f"gpu_check: {error}")
        return 2
    return 0


# The results.


def check(run: Run, names: Sequence[str], seconds: float, state: dict[str, Any]) -> int:
    """Run the parts in order, writing the results after each: the exit code."""
    end, parts = time.monotonic() + seconds, []
    for name in names:
        part, limit = PARTS[name]
        start = time.monotonic()
        outcome = run_part(part, run, min(limit, end - start))
        parts.append({"name": name, "seconds": time.monotonic() - start, **asdict(outcome)})
        print(f"{name}: {outcome.status} {outcome.reason}".rstrip(), flush=True)
        if name == "environment":
            state |= outcome.details
        if name == names[-1]:
            state["nvidia_smi_after"] = nvidia_smi(run)
        write_results(run, state, parts)
        if name == "environment" and outcome.status == "failed":
            print(outcome.reason, file=sys.stderr)
            return 2
    return 1 if any(part["status"] == "failed" for part in parts) else 0


def run_part(part: Part, run: Run, seconds: float) -> Outcome:
    """Its outcome; a fault of this script in one part leaves the others their turn."""
    if seconds < MIN_SECONDS:
        return Outcome(status="skipped", reason="no time left")
    try:
        return part(run, seconds)
    except Exception as error:
        return Outcome(status="failed", reason=f"gpu_check itself: {type(error).__name__}: {error}")


def write_results(run: Run, state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
    """Both files, as of now."""
    values = {"is_dry_run": run.is_dry_run, "state": state, "parts": parts}
    (run.directory / "gpu_check.json").write_text(json.dumps(values, indent=2) + "\n")
    bench = run.directory / "bench.md"
    page = as_markdown(values, bench.read_text() if bench.exists() else "")
    (run.directory / "gpu_check.md").write_text(page)


def as_markdown(values: Mapping[str, Any], bench: str) -> str:
    """The page for docs/gpu/."""
    state = values["state"]
    lines = [f"# {state.get('device', 'No device')}, {state['date']}", ""]
    if values["is_dry_run"]:
        lines += ["**A dry run on the emulator: nothing here was measured on hardware.**", ""]
    lines += [f"* {key}: {value}" for key, value in state.items()]
    lines += ["", "## Parts", "", "| part | | seconds | |", "|---|---|---|---|"]
    for part in values["parts"]:
        reason = part["reason"].replace("|", "\\|").replace("\n", " ")
        note = "; ".join(filter(None, [reason, short_details(part)]))
        lines.append(f"| {part['name']} | {part['status']} | {part['seconds']:.0f} | {note} |")
    for part in values["parts"]:
        failures = part["details"].get("failures", []) if part["status"] == "failed" else []
        if failures:
            lines += ["", f"## Failed: {part['name']}", "", *(f"* `{each}`" for each in failures)]
    if bench:
        lines += ["", "## Benchmark", "", bench.rstrip()]
    return "\n".join(lines) + "\n"


def short_details(part: Mapping[str, Any]) -> str:
    """A part's counts in a few words; the benchmark and the environment have their own place."""
    if part["name"] in ("environment", "benchmark"):
        return ""
    items = part["details"].items()
    return ", ".join(f"{key} {value}" for key, value in items if key != "failures")


def commit(given: str | None) -> str:
    """The checkout's commit, and whether it was changed since."""
    if given:
        return given
    if not shutil.which("git") or not (ROOT / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, for people and (``--child``) for the script itself."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("gpu-check"))
    parser.add_argument("--commit", help="to be named in the results (default: git's)")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all parts")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS))
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the emulator, untimed")
    children = ("environment", "end-to-end", "sanitized")
    parser.add_argument("--child", choices=children, help=argparse.SUPPRESS)
    parser.add_argument("--tool", choices=SANITIZERS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts and writes what they found."""
    args = parse_arguments(argv)
    if args.child:
        return run_child(args)
    directory = args.output.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("gpu_check.log", "bench.json", "bench.md"):  # of an earlier run
        (directory / name).unlink(missing_ok=True)
    state = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit(args.commit),
    }
    names = [name for name in PARTS if name in args.only]
    run = Run(directory=directory, is_dry_run=args.dry_run)
    return check(run, names, args.seconds, state)


if __name__ == "__main__":
    sys.exit(main())
