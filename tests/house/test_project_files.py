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


def test_the_log_is_newest_first() -> None:
    text = (ROOT / "docs/LOG.md").read_text(encoding="utf-8")
    dates = re.findall(r"^## (\d{4}-\d\d-\d\d): ", text, re.MULTILINE)
    assert len(dates) == text.count("\n## ") > 1
    assert dates == sorted(dates, reverse=True)


def test_names_in_links_of_the_docs_are_in_the_linked_files() -> None:
    """A link such as [`Pool.take`](pool.py) names a class, function or constant of that file."""
    missing = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        links = re.findall(r"\[`([\w.]+)`\]\(([^)#]+\.py)\)", page.read_text(encoding="utf-8"))
        for name, link in links:
            last = re.escape(name.rpartition(".")[2])
            defined = re.compile(rf"(?:def|class) {last}\b|^(?: {{4}})?{last}\b", re.MULTILINE)
            file = page.parent / link
            if not file.is_file() or not defined.search(file.read_text(encoding="utf-8")):
                missing.append(f"{page.name}: {name} in {link}")
    assert missing == []
