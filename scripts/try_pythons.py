"""Try mie on the newest obtainable patch release of each supported Python.

    python scripts/try_pythons.py [--minutes 20] [--folder build/pythons] [3.13 3.14 …]

Newer patch releases of Python break what older ones accept. A release comes from this machine (the
PATH, or pyenv), or from the packages of Debian's newest suite. They are unpacked into a folder with
their own C library, so nothing is installed on the machine. On each release, mie is installed with
its pinned dependencies, every public name is loaded, the demo's first story is written, and more
than 500 quick tests run. As many releases are tried at a time as there are CPUs.

A Python that cannot be had is skipped with the reason, and so is one for which no time is left. The
exit code is 1 if mie fails on any release that was tried.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ("--constraint", str(ROOT / "constraints.txt"))
ROOMS = (
    "cli config engine events llm metrics ops_attention ops_sampling outputs params public_names "
    "rope scheduler"
)
TESTS = tuple(
    str(path.relative_to(ROOT))
    for name in ROOMS.split()
    for path in ROOT.glob(f"tests/unit/*/test_{name}.py")
)
LOAD = "import mie; [getattr(mie, name) for name in mie.__all__]"
RELEASE = "import platform; print(platform.python_version())"
STORY = "Tell me a story about Mia the otter, the mill and a bell."

Version = tuple[int, ...]


class Unobtainable(Exception):
    """This Python, or its packages, cannot be had here. The message is the reason."""


class Broken(Exception):
    """mie does not work on this Python. The message is the step and the end of its output."""


@dataclass(frozen=True)
class Interpreter:
    """A release of Python, and a wheel of pip if its own ``venv`` cannot bring one."""

    path: Path
    release: str
    origin: str
    pip: Path | None = None


class Clock:
    """The time that is left for all releases together."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def run(
        self,
        command: Sequence[str | Path],
        limit: float,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[bool, str]:
        """Run a command for at most ``limit`` seconds; return whether it succeeds, and its output.

        Raises:
            Unobtainable: no time is left for it.
        """
        left = self.end - time.monotonic()
        if left <= 0:
            raise Unobtainable("no time is left")
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # its children end with it
        )
        try:
            output, _ = process.communicate(timeout=min(limit, left))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            if left < limit:
                raise Unobtainable("no time is left") from None
            return False, f"no end within {limit:g} s"
        return process.returncode == 0, output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="3.X", help="only these")
    parser.add_argument("--minutes", type=float, default=20, help="time limit for all together")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build/pythons", help="working folder"
    )
    options = parser.parse_args()
    versions = options.versions or supported()
    clock = Clock(60 * options.minutes)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    debian = Debian(folder / "debian", clock)
    kinds = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tries = [pool.submit(try_version, each, debian, folder, clock) for each in versions]
        for each in tries:
            kind, line = each.result()
            kinds.append(kind)
            print(line, flush=True)
    print(f"tried {len(kinds) - kinds.count('skipped')} of {len(kinds)} supported Pythons")
    return int("failed" in kinds)


def supported() -> list[str]:
    """Return the versions that the classifiers of the package name."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def try_version(version: str, debian: "Debian", folder: Path, clock: Clock) -> tuple[str, str]:
    """Try mie on one version. Return "passed", "skipped" or "failed", and a line about it."""
    began, release = time.monotonic(), version
    try:
        with debian.turn:
            interpreter = newest(version, debian, clock)
        release = f"{interpreter.release} ({interpreter.origin})"
        kind, report = "passed", try_interpreter(interpreter, folder / version, clock)
    except Unobtainable as reason:
        kind, report = "skipped", str(reason)
    except Broken as reason:
        kind, report = "failed", str(reason)
    return kind, f"Python {release} {kind}: {report} [{time.monotonic() - began:.0f} s]"


def newest(version: str, debian: "Debian", clock: Clock) -> Interpreter:
    """Return the newest release of a version, from this machine or from Debian.

    Raises:
        Unobtainable: neither has one.
    """
    found = [
        Interpreter(path, release, "of this machine") for path, release in local(version, clock)
    ]
    best = max(found, key=lambda each: numbers(each.release), default=None)
    try:
        offered = debian.release_of(version)
        if best is None or numbers(offered) > numbers(best.release):
            return debian.unpack(version)
    except Unobtainable as reason:
        if best is None:
            raise Unobtainable(f"this machine has none, and {reason}") from None
        return replace(best, origin=f"of this machine, because {reason}")
    assert best is not None
    return best


def local(version: str, clock: Clock) -> Iterator[tuple[Path, str]]:
    """Yield the interpreters of a version on this machine, and their releases."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(f"python{version}")
    paths = [*pyenv.glob(f"versions/{version}.*/bin/python{version}")]
    for path in [*([Path(on_path)] if on_path else []), *paths]:
        works, output = clock.run((path, "-c", RELEASE), 20)
        if works and output.startswith(f"{version}."):
            yield path, output.strip()


def numbers(release: str) -> Version:
    """Return the numbers that a release begins with: (3, 14, 8) for "3.14.8-1"."""
    return tuple(map(int, re.findall(r"\d+", release)[:3]))


class Debian:
    """The packages of Debian's newest suite, from the mirror that this machine uses."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock = folder, clock
        self.environment = {"APT_CONFIG": str(folder / "apt.conf")}
        self.problem: str | None = None
        self.is_ready = False
        self.turn = threading.Lock()
        """Held by the thread that uses the folder."""

    def release_of(self, version: str) -> str:
        """Return the newest release of a version that the suite has."""
        self.prepare()
        _, output = self.clock.run(
            ("apt-cache", "madison", f"python{version}"), 60, self.environment
        )
        releases = re.findall(r"\| +([\d.]+)\S* +\|", output)
        if not releases:
            raise Unobtainable(f"Debian's newest suite has no python{version}")
        return max(releases, key=numbers)

    def prepare(self) -> None:
        """Read the suite's list of packages once, with settings apart from the machine's."""
        if self.is_ready:
            return
        try:
            self.problem = self.problem or self._prepare()
        except Unobtainable as reason:
            self.problem = str(reason)
        if self.problem:
            raise Unobtainable(self.problem)
        self.is_ready = True

    def _prepare(self) -> str | None:
        missing = [name for name in ("apt-get", "apt-cache", "dpkg") if not shutil.which(name)]
        if missing:
            return f"{missing[0]} is not installed"
        _, listed = self.clock.run(
            (
                "apt-get",
                "indextargets",
                "--format",
                "$(ORIGIN) $(REPO_URI)",
                "Created-By: Packages",
            ),
            60,
        )
        mirrors = [line.split()[1] for line in listed.splitlines() if line.startswith("Debian ")]
        if not mirrors:
            return "its package manager has no list of Debian's packages"
        for part in ("lists/partial", "archives/partial"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        signed = f"[signed-by={keys}] " if Path(keys).exists() else ""
        (self.folder / "sources.list").write_text(f"deb {signed}{mirrors[0]} unstable main\n")
        (self.folder / "apt.conf").write_text(
            f'Dir::State "{self.folder}";\nDir::State::status "/dev/null";\n'
            f'Dir::Cache "{self.folder}";\nDir::Etc::sourcelist "{self.folder}/sources.list";\n'
            'Dir::Etc::sourceparts "-";\nAPT::Sandbox::User "root";\n'
        )
        works, output = self.clock.run(("apt-get", "update"), 180, self.environment)
        return None if works else f"apt-get update fails: {last_line(output)}"

    def unpack(self, version: str) -> Interpreter:
        """Return a release that uses only the C library and the libraries of its own suite."""
        python = f"python{version}"
        command = ("apt-get", "install", "--yes", "--download-only", "--no-install-recommends")
        wanted = (python, "python3-pip-whl", "libstdc++6")
        works, output = self.clock.run((*command, *wanted), 300, self.environment)
        if not works:
            raise Unobtainable(f"apt-get cannot download {python}: {last_line(output)}")
        root = self.folder / version
        shutil.rmtree(root, ignore_errors=True)
        for package in sorted((self.folder / "archives").glob("*.deb")):
            works, output = self.clock.run(("dpkg", "--extract", package, root), 60)
            if not works:
                raise Unobtainable(f"dpkg cannot unpack {package.name}: {last_line(output)}")
        [loader] = root.glob("usr/lib*/ld-linux*.so.*")
        [libraries] = root.glob("usr/lib/*-linux-gnu*")
        # Libraries from the index find the libraries of this suite through the program's RPATH.
        settings = ("--force-rpath", "--set-rpath", libraries, "--set-interpreter", loader)
        path = root / "usr/bin" / python
        works, output = self.clock.run((self.patchelf(), *settings, path), 60)
        if works:
            works, output = self.clock.run((path, "-c", RELEASE), 60)
        if not works:
            raise Unobtainable(f"{python} of Debian does not start here: {last_line(output)}")
        pip = next(root.glob("usr/share/python-wheels/pip-*.whl"))
        return Interpreter(path, output.strip(), "of Debian's newest suite", pip)

    def patchelf(self) -> Path:
        """Return the program that sets a program's loader. Versions before 0.19 break these."""
        folder = self.folder / "patchelf"
        if not folder.exists():
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--target", folder)
            works, output = self.clock.run((*pip, "patchelf>=0.19"), 120)
            if not works:
                raise Unobtainable(f"pip cannot install patchelf: {last_line(output)}")
        return folder / "bin/patchelf"


def try_interpreter(interpreter: Interpreter, folder: Path, clock: Clock) -> str:
    """Install mie with its dependencies, use it, and return the summary of the tests.

    Raises:
        Unobtainable: packages cannot be installed at all, or no time is left.
        Broken: a dependency cannot be installed, or mie does not work.
    """
    shutil.rmtree(folder, ignore_errors=True)
    without = ["--without-pip"] if interpreter.pip else []
    works, output = clock.run((interpreter.path, "-m", "venv", *without, folder), 120)
    if not works:
        raise Unobtainable(f"venv fails: {last_line(output)}")
    python = str(folder / "bin/python")
    pip = (python, interpreter.pip / "pip") if interpreter.pip else (python, "-m", "pip")
    install = (*pip, "install", "--quiet", "--no-compile", *CONSTRAINTS)
    works, output = clock.run((*install, "hatchling", "hatch-fancy-pypi-readme"), 180)
    if not works:
        raise Unobtainable(f"pip reaches no package index: {last_line(output)}")
    steps: dict[str, tuple[tuple[str | Path, ...], float]] = {
        "the installation of dependencies": (
            (*install, "--only-binary", ":all:", "--no-build-isolation", "--editable", ".",
             "pytest", "hypothesis"), 300,
        ),
        "loading every public name": ((python, "-c", LOAD), 60),
        "mie doctor": ((python, "-m", "mie", "doctor", "--backend", "numpy"), 120),
        "mie generate": ((python, "-m", "mie", "generate", STORY), 120),
        "the tests": (
            (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *TESTS), 600,
        ),
    }  # fmt: skip
    for name, (command, limit) in steps.items():
        works, output = clock.run(command, limit)
        if not works:
            raise Broken(f"{name}\n{output[-4000:]}")
    return last_line(output)


def last_line(output: str) -> str:
    """Return the last line that says anything."""
    return next((line for line in reversed(output.splitlines()) if line.strip()), "no output")


if __name__ == "__main__":
    sys.exit(main())
