"""Test the script that tries each supported Python, with imitated machines."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VERSIONS = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())


def tried(folder: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path, "PYENV_ROOT": str(folder / "pyenv")}
    command = (sys.executable, ROOT / "scripts/try_pythons.py", "--folder", folder / "work", *words)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def interpreter(folder: Path, version: str, script: str) -> None:
    """Write a program that answers as a Python of this version, and does ``script`` otherwise."""
    path = folder / f"pyenv/versions/{version}/bin/python{version.rpartition('.')[0]}"
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\ncase "$*" in *platform*) echo {version};; *) {script};; esac\n')
    path.chmod(0o755)


def test_a_machine_without_pythons_and_packages_skips_each_with_the_reason(tmp_path: Path) -> None:
    result = tried(tmp_path)
    assert result.returncode == 0
    *lines, last = result.stdout.splitlines()
    assert last == f"tried 0 of {len(VERSIONS)} supported Pythons"
    for version, line in zip(VERSIONS, lines, strict=True):
        reason = "this machine has none, and apt-get is not installed"
        assert line.startswith(f"Python {version} skipped: {reason}")


def test_no_time_left_skips_each_python(tmp_path: Path) -> None:
    interpreter(tmp_path, f"{VERSIONS[-1]}.9", "exit 0")
    result = tried(tmp_path, "--minutes", "0")
    assert result.returncode == 0
    assert result.stdout.count("skipped: no time is left") == 1
    assert "tried 0 of" in result.stdout


def test_the_newest_patch_release_of_the_machine_is_taken(tmp_path: Path) -> None:
    for patch in (2, 10, 9):
        interpreter(tmp_path, f"3.13.{patch}", "echo no venv here; exit 1")
    result = tried(tmp_path, "3.13")
    assert result.returncode == 0
    assert "Python 3.13.10 (of this machine, because apt-get is not installed) skipped: " in (
        result.stdout
    )
    assert "venv fails: no venv here" in result.stdout


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("*only-binary*", "the installation of dependencies"),
        ("*getattr*", "loading every public name"),
        ("*doctor*", "mie doctor"),
        ("*generate*", "mie generate"),
        ("*cacheprovider*", "the tests"),
        ("nothing", ""),
    ],
)
def test_a_step_that_fails_fails_the_run_and_is_named(tmp_path: Path, step: str, name: str) -> None:
    answers = f'case "$*" in {step}) echo a traceback; exit 1;; *) echo 600 passed;; esac'
    venv = (
        'for word; do folder="$word"; done; /bin/mkdir -p "$folder/bin"; '
        f"printf '%s\\n' '#!/bin/sh' '{answers}' > \"$folder/bin/python\"; "
        '/bin/chmod +x "$folder/bin/python"'
    )
    interpreter(tmp_path, "3.13.9", venv)
    result = tried(tmp_path, "3.13")
    assert result.returncode == (1 if name else 0), result.stdout
    if name:
        assert f"failed: {name}\na traceback" in result.stdout
    else:
        assert "passed: 600 passed" in result.stdout
    assert result.stdout.endswith("tried 1 of 1 supported Pythons\n")


def test_the_tests_that_it_runs_exist() -> None:
    text = (ROOT / "scripts/try_pythons.py").read_text()
    rooms = "".join(re.findall(r'^    "([\w ]+)"$', text, re.MULTILINE)).split()
    assert len(rooms) > 10
    assert all(len([*ROOT.glob(f"tests/unit/*/test_{room}.py")]) == 1 for room in rooms)
