"""Test ``mie doctor`` on imitated machines: a Jetson, a server, a container, a bare laptop."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from mie.base.commands import CommandError, NoAnswerError
from mie.cli.diagnosis.machine import Check, Machine, find_facts
from mie.cli.doctor import BACKENDS, add_parser, examine, render, run
from mie.load import backends

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GIB = 1 << 30
ORIN = {"name": "Orin", "capability": "8.7", "memory": 8 * GIB, "integrated": True}
HOPPER = {"name": "NVIDIA H200", "capability": "9.0", "memory": 140 * GIB, "integrated": False}
MEMORY = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"
KERNEL_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build\n"
)
NO_CUPY = {"packages": {}, "found": False}
NUMPY = {"version": "2.4.6", "blas": "scipy-openblas", "blas_version": "0.3.31"}

JIT = {
    "numba": "0.68.1",
    "llvmlite": "0.50.0",
    "cpu": "znver4",
    "vector_bits": 512,
    "num_threads": 8,
    "cache": "/home/mia/.cache/mie/jit",
}

PRODUCTS = {"kernels": "SkylakeX", "is_controlled": True, "num_threads": 8}


RELEASE = "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n# KERNEL"
MODEL = "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0"
POWER_MODES = "".join(
    f"< POWER_MODEL ID={number} NAME={name} >\nCPU_ONLINE CORE_0 1\n"
    for number, name in enumerate(("15W", "25W", "MAXN_SUPER", "7W"))
)


JETSON = {
    "/etc/nv_tegra_release": RELEASE,
    "/proc/device-tree/model": MODEL,
    "/etc/nvpmodel.conf": POWER_MODES,
}


@dataclass(frozen=True, kw_only=True)
class FakeMachine(Machine):
    """A machine with its files under ``root``. Its commands and libraries give prepared answers."""

    environment: Mapping[str, str] = field(default_factory=dict)
    system: str = "Linux"
    architecture: str = "x86_64"
    python: str = "3.12.1"
    num_cpus: int = 8
    num_usable_cpus: int = 8
    commands: Mapping[str, str] = field(default_factory=lambda: {"g++ --version": "g++ 12.2\nx"})
    facts: Mapping[str, dict[str, Any] | CommandError] = field(default_factory=dict)

    def run(self, command: Sequence[str], timeout: float = 10.0) -> str:
        if command[0] == sys.executable:
            return json.dumps(self.facts_about(" ".join(command[6:]), timeout))
        if " ".join(command) not in self.commands:
            raise CommandError("is not installed")
        return self.commands[" ".join(command)]

    def facts_about(self, topic: str, timeout: float) -> dict[str, Any]:
        usual: dict[str, dict[str, Any]] = {
            "numpy": NUMPY,
            "products": PRODUCTS,
            "jit": JIT,
            "driver": {"found": False, "error": "libcuda.so.1: cannot open"},
            "cupy": NO_CUPY,
            "package": {},
            "backend numpy": {},
            "backend jit": {},
            "backend cupy-emulated": {},
            "backend cupy": {"error": "needs CuPy"},
        }
        facts = self.facts.get(topic, usual[topic])
        if isinstance(facts, NoAnswerError) and timeout > 10:
            return {}
        if isinstance(facts, CommandError):
            raise facts
        return facts


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path, {"/proc/meminfo": MEMORY})


def cupy(**changes: Any) -> dict[str, Any]:
    """Return the facts of a CuPy that works on one H200."""
    usual = {
        "packages": {"cupy-cuda12x": "14.2.0"},
        "version": "14.2.0",
        "cuda": "12.9",
        "nvrtc": "12.9",
        "cublas": "12.9.1",
        "free": [130 * GIB],
    }
    return {name: value for name, value in {**usual, **changes}.items() if value is not None}


def driver(*cuda: int, gpus: Sequence[dict[str, Any]] = (HOPPER,), **more: Any) -> dict[str, Any]:
    return {"cuda": ".".join(map(str, cuda)), "gpus": list(gpus), **more}


def checks_of(machine: Machine) -> dict[str, Check]:
    return {check.name: check for check in run_checks(machine)}


def run_checks(machine: Machine) -> list[Check]:
    checks, _ = examine(machine, [], no_bar)
    return checks


@contextmanager
def no_bar(number: int) -> Iterator[Callable[[int], None]]:
    yield lambda num_new: None


def on(root: Path, **facts: Any) -> dict[str, Check]:
    """Return the checks of a machine whose libraries report ``facts``."""
    return checks_of(FakeMachine(root=root, facts=facts))


def test_a_healthy_machine_has_no_problems(root: Path) -> None:
    checks = {check.name: check for check in run_checks(FakeMachine(root=root))[:9]}
    assert {check.status for check in checks.values()} == {"ok"}
    assert {name: check.value for name, check in checks.items()} == {
        "Python": "3.12.1, Linux x86_64",
        "NumPy": "2.4.6, BLAS scipy-openblas 0.3.31",
        "BLAS settings": "none that cost speed",
        "products": "SkylakeX kernels of the BLAS; 8 threads in large steps",
        "batch invariance": "--batch-invariant on numpy gives the bits of SkylakeX kernels of BLAS "
        "0.3.31, in any process",
        "backend jit": "Numba 0.68.1, llvmlite 0.50.0; znver4, vectors of 512 bits; 8 threads; "
        "kernels are kept in /home/mia/.cache/mie/jit",
        "CPUs": "8",
        "memory": "8.0 GiB available of 16.0 GiB",
        "C++ compiler": "g++ 12.2",
    }


# One check at a time, on machines of every kind.

CASES = tomllib.loads(Path(__file__).with_name("doctor_cases.toml").read_text())["case"]
T4 = {**HOPPER, "name": "Tesla T4", "capability": "7.5"}
GPUS = {"orin": ORIN, "hopper": HOPPER, "t4": T4}
JETSON_FACTS = {"driver": {"cuda": "12.6", "gpus": ["orin"]}, "cupy": {"free": [GIB]}}
USUAL = {"numpy": NUMPY, "products": PRODUCTS, "jit": JIT, "driver": {}}


def facts_of(topic: str, changes: dict[str, Any]) -> dict[str, Any] | CommandError:
    """Return what a library reports: the facts of a healthy one with a case's changes."""
    if "crash" in changes:
        return CommandError(changes["crash"])
    if "found" in changes:
        return changes
    given = {name: None if value == "" else value for name, value in changes.items()}
    if topic == "cupy":
        return cupy(**given)
    gpus = {"gpus": [GPUS[name] for name in given["gpus"]]} if "gpus" in given else {}
    return {**USUAL[topic], **given, **gpus}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['check']}: {case['value'][:40]}")
def test_a_check(root: Path, case: dict[str, Any]) -> None:
    settings = {name: case[name] for name in case.keys() & FakeMachine.__dataclass_fields__.keys()}
    facts = case.get("facts", {})
    if case.get("on") == "jetson":
        write(root, JETSON)
        facts = {**JETSON_FACTS, **facts}
        commands = {"nvpmodel -q": "NV Power Mode: MAXN_SUPER\n2\n"}
        settings = {"architecture": "aarch64", "commands": commands, **settings}
    if case.get("has_kernel_module"):
        write(root, {"/proc/driver/nvidia/version": KERNEL_MODULE})
    write(root, case.get("files", {}))
    settings["facts"] = {topic: facts_of(topic, changes) for topic, changes in facts.items()}
    found = checks_of(FakeMachine(root=root, **settings))[case["check"]]
    assert (found.status, found.value[: len(case["value"])]) == (case["status"], case["value"])
    assert case.get("remedy", "") in (found.remedy or "")


def test_the_extras_bring_cuda_but_for_a_jetson_which_has_its_own() -> None:
    """The wheels of `cupy-cuda12x[ctk]` are for servers. A Jetson is recognised by its kernel's
    name."""
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    for version in (12, 13):
        [line] = re.findall(rf"^cuda{version} = \[(.*?)^\]", project, re.M | re.S)
        found = [Requirement(text) for text in re.findall(r'"(.*?)",?$', line, re.M)]
        for release, extras in (("6.8.0-60-generic", {"ctk"}), ("5.15.148-tegra", set())):
            environment = {"platform_release": release}
            [taken] = [each for each in found if each.marker.evaluate(environment)]
            assert (taken.name, taken.extras) == (f"cupy-cuda{version}x", extras)


# The report


def command(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["doctor", *arguments])


def test_the_table(root: Path) -> None:
    facts = {"driver": driver(12, 6)}
    machine = FakeMachine(root=root, facts=facts)
    text = render(*examine(machine, BACKENDS, no_bar))
    lines = text.splitlines()
    assert "ok       Python         3.12.1, Linux x86_64" in lines
    at = lines.index("problem  CuPy           not installed")
    assert lines[at + 1] == "                        remedy: pip install 'cupy-cuda12x[ctk]'"
    assert lines[-5:] == [
        "",
        "backend  numpy          works",
        "backend  jit            works",
        "backend  cupy-emulated  works",
        "backend  cupy           does not work: needs CuPy",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "tried"),
    [
        ((), 0, BACKENDS),
        (("--backend", "numpy"), 0, ("numpy",)),
        (("--backend", "cupy"), 1, ("cupy",)),
    ],
)
def test_the_exit_code_is_that_of_the_requested_backend(root, capsys, arguments, code, tried):
    assert run(command("--json", *arguments), FakeMachine(root=root)) == code
    printed = json.loads(capsys.readouterr().out)
    assert tuple(each["name"] for each in printed["backends"]) == tried
    assert printed["checks"][0] == {
        "name": "Python",
        "status": "ok",
        "value": "3.12.1, Linux x86_64",
        "remedy": None,
    }
    assert run(command(*arguments), FakeMachine(root=root)) == code
    assert capsys.readouterr().out.startswith("ok       Python")


def test_the_doctor_tries_the_backends_of_the_flag() -> None:
    assert set(BACKENDS) == set(backends.BACKENDS)


def test_a_machine_without_libraries_still_has_a_report(tmp_path: Path) -> None:
    nothing = CommandError("is not installed")
    topics = ("numpy", "products", "driver", "cupy", *(f"backend {name}" for name in BACKENDS))
    machine = FakeMachine(root=tmp_path, commands={}, facts=dict.fromkeys(topics, nothing))
    checks, trials = examine(machine, BACKENDS, no_bar)
    assert all("error" in trial for trial in trials.values())
    assert render(checks, trials)


def test_a_trial_that_compiles_is_waited_for_only_if_it_was_asked_for(root, capsys) -> None:
    """The fake jit answers after ten seconds."""
    machine = FakeMachine(root=root, facts={"backend jit": NoAnswerError("gave no answer")})
    assert run(command(), machine) == 0
    line = capsys.readouterr().out.splitlines()[-3]
    assert line == (
        "backend  jit            unknown: no answer within 3 s (it compiles, or the machine is "
        "busy); mie doctor --backend jit waits for one"
    )
    run(command("--json"), machine)
    assert json.loads(capsys.readouterr().out)["backends"][1]["works"] is None
    assert run(command("--backend", "jit"), machine) == 0
    assert capsys.readouterr().out.endswith("jit            works\n")


def test_no_backend_works_where_the_package_cannot_be_loaded(root: Path, capsys) -> None:
    reason = "ImportError: mie.LLM cannot be loaded: AttributeError: no __code__"
    machine = FakeMachine(root=root, facts={"package": {"error": reason}})
    assert run(command("--backend", "numpy"), machine) == 1
    assert f"numpy          does not work: {reason}" in capsys.readouterr().out


def test_the_modules_of_all_public_names_are_imported_to_judge_the_package() -> None:
    program = (
        "import sys, mie; from mie.cli.diagnosis.machine import find_facts; "
        "assert find_facts('package') == {}; print(sorted({*mie._HOMES.values()} - {*sys.modules}))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"


def test_a_module_that_cannot_be_imported_is_a_fact_about_the_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mie.frontend.llm", None)
    assert "import of mie.frontend.llm halted" in find_facts("package")["error"]


# Questions to the libraries.


def test_a_file_in_the_current_folder_is_not_loaded_as_a_library(monkeypatch, tmp_path) -> None:
    write(tmp_path, {"numpy.py": "raise SystemExit(5)", "json.py": "raise SystemExit(6)"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])  # "" is this one
    assert "version" in Machine().ask("numpy")


class Trial:
    """A backend whose argmax is broken, or that raises."""

    def __init__(self, outcome: int | Exception) -> None:
        self.outcome = outcome

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None

    def sample(self, *_: Any) -> list[int]:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return [self.outcome]


@pytest.mark.parametrize(
    ("outcome", "facts"),
    [
        (37, {}),
        (36, {"error": "it computed token 36, expected 37"}),
        (OSError("no\nmemory"), {"error": "OSError: no memory"}),
        (KeyError(), {"error": "KeyError: KeyError"}),
    ],
)
def test_a_backend_is_judged_by_its_results(monkeypatch, outcome, facts) -> None:
    monkeypatch.setattr(backends, "load_backend", lambda name: Trial(outcome))
    assert find_facts("backend", "numpy") == facts
