"""The files around the code agree with each other."""

import json
import re
import shlex
from pathlib import Path

import yaml

import mie.cli
from mie.base.version import __version__
from mie.errors import EXTRAS
from mie.serve.config import ServeConfig

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


def lower_bounds() -> dict[str, str]:
    """Return the oldest allowed versions of the dependencies, also of the small extras."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(\w+) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    wanted = {"dependencies", "jit", "serve", "structured", "chat", "hub"}
    lines = "".join(body for name, body in lists if name in wanted)
    found = re.findall(r'"([\w-]+)>=([\d.]+)', lines)
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_the_lowest_constraints_are_the_lower_bounds() -> None:
    text = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^([\w-]+)==([\d.]+)$", text, re.MULTILINE)
    bounds = lower_bounds()
    assert {name.replace("_", "-") for name, _ in pins} == bounds.keys()
    for name, version in pins:
        padded = bounds[name.replace("_", "-")]
        assert re.fullmatch(rf"{re.escape(padded)}(\.0)*", version), name


def extras() -> dict[str, str]:
    """Return the requirements of each extra, as TOML."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    part = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return dict(re.findall(r"^(\w+) = \[(.*?)\](?: #[^\n]*)?$", part, re.MULTILINE | re.DOTALL))


def test_messages_name_the_packages_of_each_extra() -> None:
    """A limit belongs to a name only where the newest version of a package may not do."""
    found = extras()
    assert EXTRAS.keys() == found.keys() - {
        *("hub", "all", "bench", "nvrtc", "test", "browser", "check", "docs")
    }
    for extra, command in EXTRAS.items():
        requirements = re.sub("#.*", "", found[extra]).replace('"mie[serve]"', found["serve"])
        names = {}
        for name, specifier in re.findall(r'"([\w-]+(?:\[\w+\])?)([^;"]*)', requirements):
            names.setdefault(name, ",".join(re.findall(r"<[\d.]+", specifier)))
        names = {name: limit for name, limit in names.items() if f"{name}[ctk]" not in names}
        assert shlex.split(command) == [name + limit for name, limit in names.items()], extra


def wrong_commands(text: str) -> list[str]:
    """Return what would install a package of the name ``mie`` from an index."""
    return re.findall(r"""mie\[\w*\]|pip install (?:-\S+ )*['"]?mie\b(?!\.)""", text)


def test_no_message_installs_a_package_called_mie_from_an_index() -> None:
    """Nothing is published, so a stranger may register the name."""
    commands = ["'mie[jit]'", "mie", '-U "mie[all]"', "--force-reinstall mie==1"]
    assert all(wrong_commands(f"use pip install {command} now") for command in commands)
    assert not wrong_commands("pip install '.[jit]' or mie.cli or use mie; pip install numba")
    for path in (ROOT / "mie").rglob("*"):
        if path.suffix in (".py", ".json", ".html", ".js", ".toml", ".md"):
            assert not wrong_commands(path.read_text(encoding="utf-8")), path


def test_docs_install_from_a_clone() -> None:
    """An extra has the name ``mie[…]`` in a table, and no command of the docs has such a name."""
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if path.name != "releasing.md":
            lines = path.read_text(encoding="utf-8").splitlines()
            wrong = [line for line in lines if re.search(r"pip install (-\S+ )*.?mie\b", line)]
            assert not [line for line in wrong if "do not run" not in line], path


def test_workflows_run_targets_and_scripts_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    steps = [
        step.get("run", "")
        for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        for step in job["steps"]
    ]
    targets = [target for run in steps for target in re.findall(r"\bmake ([\w-]+)$", run)]
    assert {"docs", "test-all", "test-lowest", "check-build"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    scripts = [script for run in steps for script in re.findall(r"scripts/[\w/]+\.py", run)]
    assert {"scripts/mutate.py", "scripts/check_build.py"} <= set(scripts)
    assert all((ROOT / script).is_file() for script in scripts)
    commands = set(json.loads((ROOT / "package.json").read_text())["scripts"])
    assert {"check", "test"} <= commands
    assert {"npm run check", "npm test"} <= set(steps)


def test_the_dockerfile_copies_what_the_build_needs_and_starts_the_server() -> None:
    lines = re.findall(r"^([A-Z]+) (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    kept = set((ROOT / ".dockerignore").read_text().split())
    copied = [path for kind, rest in lines if kind == "COPY" for path in rest.split()[:-1]]
    assert {f"!{path}" for path in copied} == {line for line in kept if line.startswith("!")}
    project = (ROOT / "pyproject.toml").read_text()
    assert {*re.findall(r'license-files = \["(\w+)', project), "README.md", "mie"} <= {*copied}
    assert all((ROOT / path).exists() for path in copied)
    extras = set(re.findall(r"^(\w+) = \[", project.partition("optional-dependencies]")[2], re.M))
    pages = "".join(path.read_text() for path in (ROOT / "Dockerfile", ROOT / "docs/serving.md"))
    named = set(re.findall(r"\bEXTRAS=([\w,]+)", pages))
    assert {"all", "all,cuda12"} <= named
    assert {extra for each in named for extra in each.split(",")} <= extras
    [start] = [json.loads(rest) for kind, rest in lines if kind == "ENTRYPOINT"]
    [default] = [json.loads(rest) for kind, rest in lines if kind == "CMD"]
    arguments = mie.cli.new_parser(words := [*start, *default][1:]).parse_args(words)
    assert (start[0], arguments.host, arguments.port) == ("mie", "0.0.0.0", None)
    assert ("EXPOSE", f"{ServeConfig().port}") in lines
    [user] = re.findall(r"^USER (\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert f"--uid {user} " in dict(lines)["RUN"]


def test_the_changelog_begins_with_this_version_or_with_what_follows_it() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    newest = next(heading for heading in headings if heading != "Unreleased")
    assert re.fullmatch(rf"{re.escape(__version__)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", newest)


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
