"""The files around the code agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github/workflows/test.yml").read_text()


def test_the_workflow_runs_what_ci_runs_on_every_supported_python():
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    [matrix] = re.findall(r"python: \[(.*)\]", WORKFLOW)
    assert re.findall(r'"([\d.]+)"', matrix) == classifiers
    assert "run: .ci/run\n" in WORKFLOW
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()
    assert "run: make docs\n" in WORKFLOW
    assert "ubuntu-24.04-arm" in WORKFLOW


def test_the_workflow_needs_the_tests_of_the_page():
    """They are skipped without a browser, unless the environment says that it must be there."""
    steps = yaml.safe_load(WORKFLOW)["jobs"]["test"]["steps"]
    place = next(i for i, step in enumerate(steps) if step.get("run") == ".ci/run")
    assert steps[place]["env"]["MIE_NEEDS_BROWSER"] == "1"
    before = "".join(step.get("run", "") for step in steps[:place])
    assert "playwright install --with-deps chromium" in before
    assert "/usr/local/bin/chromium" in before


def test_pre_commit_runs_the_checks_of_make_check():
    makefile = (ROOT / "Makefile").read_text()
    [recipe] = re.findall(r"^check:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    checks = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"^ *entry: (.*)$", config, re.MULTILINE) == checks
