"""Break the engine one line at a time, and see that a test notices.

    python scripts/mutate.py [--only NAME] [--rungs RUNG ...] [--jobs N] [--allow N] [--list]

Each mutant of `tests/planted/rules.toml` is one wrong line that breaks a rule of a page of docs/.
A copy of the code with the mutant climbs the ladder of the room's tests, the fastest first. The
first rung that fails, or takes far longer than without the mutant, kills it. A mutant that reaches
the top has survived: a test is missing, or the line is dead.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/planted/rules.toml"
MEMORY_LIMIT = 8 << 30
"""Bytes of address space for one rung.

A mutant that never stops also never stops allocating.
"""

# This runs in the copy. It does not shrink counterexamples, and tries more examples than
# `make test`.
RUN_TESTS = f"""
import pathlib, resource, sys
import hypothesis, pytest
import mie
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_LIMIT}, {MEMORY_LIMIT}))
if not pathlib.Path(mie.__file__).is_relative_to(pathlib.Path.cwd()):
    sys.exit("mie was not imported from the copy, but from " + mie.__file__)
phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile(
    "mutate", max_examples=400, derandomize=True, deadline=None, phases=phases
)
sys.exit(pytest.main(sys.argv[1:]))
"""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A snippet of the source that occurs exactly once, and the wrong snippet."""

    name: str
    page: str
    """Page of the documentation that states the broken rule."""
    section: str
    path: str
    old: str
    new: str
    breaks: str
    """The consequence for a user or a maintainer."""

    def apply(self, source: str) -> str:
        """Return the source with the mutation.

        Raises:
            ValueError: the snippet does not occur exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: the snippet occurs {count} times in {self.path}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """Tests of similar speed."""

    name: str
    rooms: tuple[str, ...]
    """Beginnings of the paths of the mutants that climb this rung."""
    files: tuple[str, ...]
    limit: float = 600
    """Seconds after which the rung counts as hanging."""

    def fits(self, mutant: Mutant) -> bool:
        """Return whether a mutant climbs this rung."""
        return mutant.path.startswith(self.rooms)


def read_ladder() -> tuple[tuple[Rung, ...], tuple[Mutant, ...]]:
    """Return the rungs and the mutants of the table."""
    table = tomllib.loads(TABLE.read_text())
    rungs = tuple(
        Rung(name=rung["name"], rooms=tuple(rung["rooms"]), files=tuple(rung["files"]))
        for rung in table["rung"]
    )
    mutants = tuple(
        Mutant(name=name, page=rule["page"], section=rule["section"], path=rule["path"], **mutant)
        for rule in table["rule"]
        for name, mutant in rule["mutants"].items()
    )
    return rungs, mutants


RUNGS, MUTANTS = read_ladder()


@dataclass(frozen=True)
class Result:
    """How far a mutant climbed."""

    seconds: float
    killer: str | None = None
    """The rung that failed, or None for a survivor."""
    test: str = ""
    """The test that failed first, or how else the rung ended."""


class LadderError(Exception):
    """The ladder itself fails, so nothing can be said about a mutant."""


def main() -> int:
    options = parse_options()
    rungs = [rung for rung in RUNGS if rung.name in options.rungs]
    mutants = [
        mutant
        for mutant in MUTANTS
        if options.only in (None, mutant.name) and any(rung.fits(mutant) for rung in rungs)
    ]
    if not mutants:
        print(f"no mutant of these rungs is called {options.only!r}; --list names them all")
        return 2
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name:<40} {mutant.path}: {mutant.breaks}")
        return 0
    try:
        return run_ladder(mutants, rungs, options)
    except LadderError as error:
        print(error)
        return 2


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", metavar="NAME", help="run only this mutant")
    names = [rung.name for rung in RUNGS]
    parser.add_argument(
        "--rungs", nargs="+", choices=names, default=names, help="run only these rungs"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants to run at a time")
    parser.add_argument("--allow", type=int, default=0, help="number of survivors to tolerate")
    parser.add_argument("--list", action="store_true", help="name the mutants, and run nothing")
    return parser.parse_args()


def run_ladder(
    mutants: Sequence[Mutant], rungs: Sequence[Rung], options: argparse.Namespace
) -> int:
    """Print how far each mutant climbs. Return 1 if more survive than allowed."""
    num_survivors = 0
    with copied(ROOT) as source, ThreadPoolExecutor(options.jobs) as pool:
        used = [rung for rung in rungs if any(rung.fits(mutant) for mutant in mutants)]
        rungs = [timed(rung, source) for rung in used]
        run = partial(climb, source=source, rungs=rungs)
        for mutant, result in zip(mutants, pool.map(run, mutants), strict=True):
            print(row(mutant, result), flush=True)
            num_survivors += result.killer is None
    num_killed = len(mutants) - num_survivors
    print(f"\n{len(mutants)} mutants, {num_killed} killed, {num_survivors} survived")
    return int(num_survivors > options.allow)


def timed(rung: Rung, source: Path) -> Rung:
    """Return the rung with a limit based on its time without a mutation.

    Raises:
        LadderError: it fails even then.
    """
    result = climb(None, source, [rung])
    if result.killer:
        raise LadderError(f"{rung.name} fails without any mutation: {result.test}")
    print(f"without mutation: {rung.name} passes in {result.seconds:.1f} s", flush=True)
    return replace(rung, limit=30 + 3 * result.seconds)


def row(mutant: Mutant, result: Result) -> str:
    """Return one line of the table."""
    if result.killer:
        note = result.test
    else:
        note = f"breaks {mutant.page}, {mutant.section}: {mutant.breaks}"
    return f"{mutant.name:<40} {result.killer or 'SURVIVED':<9} {result.seconds:6.1f} s  {note}"


def climb(mutant: Mutant | None, source: Path, rungs: Sequence[Rung]) -> Result:
    """Run rung after rung on a copy of ``source`` with the mutation, until one fails."""
    start = time.monotonic()
    with copied(source) as directory:
        if mutant is not None:
            path = directory / mutant.path
            path.write_text(mutant.apply(path.read_text()))
        for rung in rungs:
            if mutant is not None and not rung.fits(mutant):
                continue
            test = first_failure(rung, directory)
            if test:
                return Result(time.monotonic() - start, rung.name, test)
    return Result(time.monotonic() - start)


@contextmanager
def copied(source: Path) -> Iterator[Path]:
    """Copy the code, its tests and its pages to a temporary directory.

    Mutants are made from such a copy too, because the checkout may change meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="mie-mutant-") as name:
        directory = Path(name).resolve()
        ignore = shutil.ignore_patterns("__pycache__", "pictures")
        for tree in ("mie", "tests", "docs"):  # some tests read the pages
            shutil.copytree(source / tree, directory / tree, ignore=ignore)
        shutil.copy(source / "pyproject.toml", directory)
        yield directory


def first_failure(rung: Rung, directory: Path) -> str | None:
    """Return the first test of the rung that fails, or how else the rung ended, or None."""
    early = "ignore::pytest.PytestAssertRewriteWarning"  # hypothesis, imported before pytest runs
    how = ["-x", "-q", "--tb=no", "-m", "not slow", "-p", "no:cacheprovider", "-W", early]
    environment = {
        **os.environ,
        "PYTHONPATH": str(directory),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MIE_HYPOTHESIS": "mutate",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN_TESTS, *how, *rung.files],
            cwd=directory,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=rung.limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"ends with signal {-done.returncode}"
    failed = re.search(r"^(?:FAILED|ERROR) \S*?(\w+\.py\S*)", done.stdout, re.MULTILINE)
    if not failed:  # not a failing test: the files are missing, or pytest broke down
        raise LadderError(f"{rung.name} did not run:\n{done.stdout}")
    return failed[1]


if __name__ == "__main__":
    sys.exit(main())
