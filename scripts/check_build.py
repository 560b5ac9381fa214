"""Build the source distribution and the wheel, and try the wheel as a user would.

    python scripts/check_build.py [--release] [--output-dir DIR] [--offline]

The wheel is built from the source distribution and installed in a fresh environment. There it runs
the program of the README, the command line and `mie doctor`. `--offline` takes the dependencies
from this environment and needs no package index. `--release` also checks that the changelog dates
this version, and that the README installs it by its name.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys, hatchling.build; hatchling.build.build_{kind}(sys.argv[1])"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", action="store_true", help="check that the version is dated")
    parser.add_argument("--output-dir", type=Path, help="keep both distributions there")
    parser.add_argument("--offline", action="store_true", help="take the installed dependencies")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        output = options.output_dir or Path(folder, "dist")
        output.mkdir(parents=True, exist_ok=True)
        wheel = build(output.resolve(), Path(folder))
        found = problems_of(wheel)
        if options.release:
            if not installs((ROOT / "README.md").read_text(encoding="utf-8"), "mie"):
                found.append("README.md installs from a clone, and not the release by its name")
            found += undated(version_of(wheel), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
        for problem in found:
            print(f"check_build: {problem}", file=sys.stderr)
        if not found:
            try_wheel(wheel, Path(folder, "fresh"), offline=options.offline)
            print(f"{wheel.name} installs and writes text")
    return bool(found)


def build(output: Path, folder: Path) -> Path:
    """Build the source distribution from the tree and the wheel from it; return the wheel."""
    python(sys.executable, "-c", BUILD.format(kind="sdist"), str(output), cwd=ROOT)
    sdist = max(output.glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist")
    (tree,) = (folder / "sdist").iterdir()
    python(sys.executable, "-c", BUILD.format(kind="wheel"), str(output), cwd=tree)
    return max(output.glob("*.whl"), key=lambda path: path.stat().st_mtime)


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def problems_of(wheel: Path) -> list[str]:
    """Return a sentence about each fault of the description and the contents."""
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        description = str(message_from_bytes(archive.read(metadata)).get_payload())
    found = [
        f"the wheel contains {name}"
        for name in names
        if not name.startswith("mie/") and ".dist-info/" not in name
    ]
    if not installs(description, r"mie|\."):
        found.append("the description does not begin with the install command")
    found += [
        f"the description has {match[0]!r}, which leads nowhere on the package index"
        for match in re.finditer(r"!\[[^]]*\]|\]\((?!https?:|#)[^)]*\)|<!--.*?-->", description)
    ]
    return found


def installs(text: str, what: str) -> bool:
    """Return whether a text begins with a command that installs mie from ``what``, a pattern."""
    return bool(re.search(rf"^ +pip install '?({what})", "\n".join(text.splitlines()[:24]), re.M))


def undated(version: str, changelog: str) -> list[str]:
    """Return a sentence if the changelog has no dated section for the version."""
    heading = re.compile(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", re.MULTILINE)
    return [] if heading.search(changelog) else [f"CHANGELOG.md has no date for {version}"]


def readme_program() -> str:
    """Return the first program of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)[0]


def try_wheel(wheel: Path, folder: Path, *, offline: bool) -> None:
    """Install the wheel in a fresh environment and let it write text."""
    options = ["--system-site-packages"] if offline else []
    python(sys.executable, "-m", "venv", *options, str(folder), cwd=wheel.parent)
    fresh = str(folder / "bin" / "python")
    if offline:
        site = subprocess.run(
            [fresh, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        # The dependencies of this environment come last. It may itself be a virtual one.
        paths = [path for path in sys.path if path.endswith("-packages")]
        Path(site, "dependencies.pth").write_text("\n".join(paths) + "\n")
    install = ["-m", "pip", "install", "--quiet", *(["--no-deps"] if offline else [])]
    python(fresh, *install, str(wheel), cwd=folder)
    shown = python(fresh, "-c", "import mie; print(mie.__file__)", cwd=folder)
    assert shown.startswith(str(folder)), f"another mie was imported: {shown}"
    command = str(folder / "bin" / "mie")
    for arguments in (
        [fresh, "-c", readme_program()],
        [command, "generate", "--temperature", "0", "--max-tokens", "20", "Once upon a time"],
        [command, "doctor"],
    ):
        assert python(*arguments, cwd=folder).strip(), f"{arguments} wrote nothing"
    answer = python(command, "learn", "solution", "2", cwd=folder)
    (folder / "step_2.py").write_text(answer, encoding="utf-8")
    python(command, "learn", "check", "step_2.py", cwd=folder)


def python(*command: str, cwd: Path) -> str:
    """Run a command without this process's own PYTHONPATH, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"check_build: {' '.join(command)[:200]} ended with {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
