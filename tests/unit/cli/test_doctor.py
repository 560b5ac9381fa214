"""Test ``mie doctor`` with the facts of imitated machines, and its processes on this machine."""

import argparse
import json
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import python
from packaging.requirements import Requirement
from toml_files import read_toml

from mie.cli import doctor
from mie.cli.doctor import BACKENDS, PATIENCE, TOPICS, Check, add_parser, ask, find_facts, run
from mie.load import backends

GIB = 1 << 30
GPUS = {
    "orin": {"name": "Orin", "capability": "8.7", "memory": 8 * GIB, "integrated": True},
    "hopper": {"name": "H200", "capability": "9.0", "memory": 140 * GIB, "integrated": False},
    "t4": {"name": "Tesla T4", "capability": "7.5", "memory": 16 * GIB, "integrated": False},
}
MEMORY = "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"
MODULE = "/proc/driver/nvidia/version"
HEALTHY: dict[str, dict[str, Any]] = {
    "package": {},
    "numpy": {"version": "2.4.6", "blas": "scipy-openblas", "blas_version": "0.3.31"},
    "jit": {
        "numba": "0.68.1",
        "llvmlite": "0.50.0",
        "cpu": "znver4",
        "vector_bits": 512,
        "num_threads": 8,
        "cache": "/home/mia/.cache/mie/jit",
    },
    "models": {"folder": "/models", "free": 10 * GIB, "is_writable": True},
    "driver": {"found": False},
    "cupy": {"packages": {}, "found": False},
}
CUPY = {
    "packages": {"cupy-cuda12x": "14.2.0"},
    "version": "14.2.0",
    "cuda": "12.9",
    "nvrtc": "12.9",
    "cublas": "12.9.1",
}
"""The facts of a CuPy that works."""


def check_all(facts: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Check]:
    """Return the checks of a machine with these facts and files, by their names."""
    read = {"/proc/meminfo": MEMORY, **files}.get
    return {each.name: each for each in doctor.check_all({**HEALTHY, **facts}, read)}


def test_a_healthy_machine_has_no_problems(monkeypatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.1")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(doctor, "available_cpus", lambda read: 8)
    monkeypatch.setattr(doctor, "find_spec", {"numba": 1, "starlette": 1}.get)
    monkeypatch.setattr(doctor, "available_bytes", lambda read: 8 * GIB)
    monkeypatch.setattr(doctor, "__version__", "1.2.3")
    checks = check_all({}, {})
    assert {name: check.value for name, check in checks.items() if check.status == "ok"} == {
        "Python": "3.12.1, Linux aarch64, 8 CPUs",
        "packages": "mie 1.2.3 with the extras jit, serve, without structured, chat",
        "NumPy": "2.4.6, BLAS scipy-openblas 0.3.31",
        "backend jit": "Numba 0.68.1, llvmlite 0.50.0; znver4, vectors of 512 bits; 8 threads; "
        "kernels are kept in /home/mia/.cache/mie/jit",
        "memory": "8.0 GiB available of 16.0 GiB",
        "model folder": "/models, 10.0 GiB free",
    }
    notes = {name: check.value for name, check in checks.items() if check.status == "note"}
    assert notes == {
        "driver": "none; backend cupy needs an NVIDIA GPU and its driver",
        "CuPy": "not installed; backend cupy needs it",
    }


@pytest.mark.parametrize(("name", "value"), [("machine", "riscv64"), ("system", "Darwin")])
def test_another_kind_of_machine_is_noted(monkeypatch, name: str, value: str) -> None:
    monkeypatch.setattr(platform, name, lambda: value)
    python = check_all({}, {})["Python"]
    assert python.status == "note"
    assert f"{value}" in python.value
    assert "mie is made for Linux on x86-64 and aarch64" in python.value


CASES = read_toml(Path(__file__).with_name("doctor_cases.toml"))["case"]


def facts_of(topic: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return what a library reports: the facts of a healthy one with a case's changes."""
    if topic == "driver":
        gpus = {"gpus": [GPUS[name] for name in changes["gpus"]]} if "gpus" in changes else {}
        return {**changes, **gpus}
    if "error" in changes and topic != "cupy":
        return changes
    usual = CUPY if topic == "cupy" else HEALTHY[topic]
    facts = {**usual, **changes}
    if topic == "cupy":
        return {name: value for name, value in facts.items() if value != ""}
    return {name: None if value == "" else value for name, value in facts.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['check']}: {case['value'][:40]}")
def test_a_check(case: dict[str, Any]) -> None:
    files = {**case.get("files", {}), **({MODULE: "x"} if "has_kernel_module" in case else {})}
    facts = {topic: facts_of(topic, given) for topic, given in case.get("facts", {}).items()}
    found = check_all(facts, files)[case["check"]]
    assert (found.status, found.value[: len(case["value"])]) == (case["status"], case["value"])
    assert case.get("remedy", "") in (found.remedy or "")
    assert found.remedy or found.status != "problem"


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


@pytest.fixture
def answers(monkeypatch) -> dict[str, dict[str, Any]]:
    """The facts that processes report. A test may change them."""
    works: dict[str, dict[str, Any]] = {f"backend {name}": {} for name in BACKENDS}
    facts = {**HEALTHY, **works, "backend cupy": {"error": "needs CuPy"}}

    def answer(topic: str, timeout: float = PATIENCE) -> dict[str, Any]:
        is_late = "is_late" in facts[topic] and timeout < 10  # the slow trial takes ten seconds
        return facts[topic] if is_late or "is_late" not in facts[topic] else {}

    monkeypatch.setattr(doctor, "ask", answer)
    return facts


def test_the_table(answers, capsys) -> None:
    answers["driver"] = {"cuda": "12.6", "gpus": [GPUS["hopper"]]}
    assert run(command()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok       Python         ")
    at = lines.index("problem  CuPy           not installed; backend cupy needs it")
    assert lines[at + 1] == "                        remedy: pip install 'cupy-cuda12x[ctk]'"
    assert lines[-4:] == [
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
def test_the_exit_code_is_that_of_the_requested_backend(answers, capsys, arguments, code, tried):
    assert run(command("--json", *arguments)) == code
    printed = json.loads(capsys.readouterr().out)
    assert tuple(each["name"] for each in printed["backends"]) == tried
    assert printed["checks"][2] == {
        "name": "NumPy",
        "status": "ok",
        "value": "2.4.6, BLAS scipy-openblas 0.3.31",
        "remedy": None,
    }


def test_the_doctor_tries_the_backends_of_the_flag() -> None:
    assert set(BACKENDS) == set(backends.BACKENDS)
    assert command("--backend", BACKENDS[-1]).backend == BACKENDS[-1]


def test_a_machine_without_libraries_still_has_a_report(answers, capsys) -> None:
    for topic in answers:
        answers[topic] = {"error": "the process that tried it was ended by signal SIGILL"}
    assert run(command()) == 0
    printed = capsys.readouterr().out
    assert printed.count("does not work: the process") == len(BACKENDS)
    assert printed.count("problem") == 5


def test_a_trial_that_compiles_is_waited_for_only_on_request(answers, capsys) -> None:
    answers["backend jit"] = {"error": "gave no answer", "is_late": True}
    assert run(command()) == 0
    line = capsys.readouterr().out.splitlines()[-3]
    assert line == (
        "backend  jit            unknown: no answer within 3 s (it compiles, or the machine is "
        "busy); mie doctor --backend jit waits for one"
    )
    run(command("--json"))
    assert json.loads(capsys.readouterr().out)["backends"][1]["works"] is None
    assert run(command("--backend", "jit")) == 0
    assert capsys.readouterr().out.endswith("jit            works\n")


def test_no_backend_works_where_the_package_cannot_be_loaded(answers, capsys) -> None:
    reason = "ImportError: mie.LLM cannot be loaded: AttributeError: no __code__"
    answers["package"] = {"error": reason}
    assert run(command("--backend", "numpy")) == 1
    assert f"numpy          does not work: {reason}" in capsys.readouterr().out


def test_the_modules_of_all_public_names_are_imported_to_judge_the_package() -> None:
    program = (
        "import sys, mie; from mie.cli.doctor import find_facts; "
        "assert find_facts('package') == {}; print(sorted({*mie._HOMES.values()} - {*sys.modules}))"
    )
    assert python("-c", program).stdout == "[]\n"


def test_a_module_that_cannot_be_imported_is_a_fact_about_the_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mie.frontend.llm", None)
    assert "import of mie.frontend.llm halted" in find_facts("package")["error"]


# Processes of the doctor.


def test_every_topic_has_facts_on_this_machine() -> None:
    for topic in {*TOPICS} - {"package"}:
        assert find_facts(topic), topic
    assert find_facts("models")["free"] > 0


def test_a_file_in_the_current_folder_is_not_loaded_as_a_library(monkeypatch, tmp_path) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit(5)")
    (tmp_path / "json.py").write_text("raise SystemExit(6)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])  # "" is this one
    assert "version" in ask("numpy")


@pytest.mark.parametrize(
    ("child", "facts"),
    [
        ("print('null')", {"error": "the process that tried it printed something that is no JSON"}),
        ("import os; os.abort()", {"error": "the process that tried it was ended by signal SIGAB"}),
        ("import time; time.sleep(60)", {"error": "the process that tried it", "is_late": True}),
    ],
)
def test_a_process_that_fails_is_a_fact(monkeypatch, child: str, facts: dict[str, Any]) -> None:
    monkeypatch.setattr(doctor, "_CHILD", child)
    found = ask("numpy", 1.0 if "is_late" in facts else PATIENCE)
    assert found["error"].startswith(facts["error"])
    assert found.keys() == facts.keys()


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
    assert find_facts("backend numpy") == facts
