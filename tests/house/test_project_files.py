"""The files around the code agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github/workflows/test.yml").read_text()


def test_the_workflow_runs_make_test_on_every_supported_python():
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    [matrix] = re.findall(r"python: \[(.*)\]", WORKFLOW)
    assert re.findall(r'"([\d.]+)"', matrix) == classifiers
    assert "run: make test\n" in WORKFLOW
    assert "run: make docs\n" in WORKFLOW
    assert "ubuntu-24.04-arm" in WORKFLOW


def test_pre_commit_runs_the_checks_of_make_check():
    makefile = (ROOT / "Makefile").read_text()
    [recipe] = re.findall(r"^check:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    checks = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"^ *entry: (.*)$", config, re.MULTILINE) == checks
