"""Compute the cases of suites, or read the rows that an earlier run kept."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mie
from mie.errors import MieError

from .case import Case, Row, Run, Suite
from .inputs import Input, MissingInputError, find_input, get_input, read_table

SUITES = Path(__file__).with_name("suites")


def read_suites() -> dict[str, Suite]:
    """Return the suites of the folder by name."""
    names = sorted(path.stem for path in SUITES.glob("[a-z]*.py"))
    package = f"{__package__}.suites"
    return {name: importlib.import_module(f"{package}.{name}").SUITE for name in names}


@dataclass(frozen=True, kw_only=True)
class Runner:
    """The settings of a run of suites."""

    folders: Sequence[Path]
    """Folders of data and models."""
    build: Path
    """Folder of kept rows, files of cases, and unpacked data."""
    is_quick: bool
    is_again: bool
    """Whether cases are computed again although their rows are kept."""
    inputs: Mapping[str, Input]
    code: str
    """Digest of everything that the rows of all cases depend on."""

    def rows(self, name: str, suite: Suite) -> list[Row]:
        """Return the rows of a suite, and report each to stderr."""
        digest = _digest(self.code, *_sources(SUITES / f"{name}.py"))
        rows = []
        for case in suite.cases:
            if case.is_in_quick or not self.is_quick:
                for row in self._case_rows(name, case, digest):
                    _report(f"{name}: {row.question}: {row.verdict} {row.ours} {row.reason}")
                    rows.append(row)
        return rows

    def get_inputs(self, suite: Suite) -> None:
        """Put the missing inputs of a suite into the first folder, and report each."""
        for name in dict.fromkeys(name for case in suite.cases for name in case.inputs):
            try:
                find_input(self.inputs[name], self.folders, self.build / "data")
            except MissingInputError:
                try:
                    _report(f"got {get_input(self.inputs[name], self.folders[0])}")
                except MissingInputError as error:
                    _report(str(error))

    def _case_rows(self, suite: str, case: Case, code: str) -> list[Row]:
        """Return the rows of a case. Rows are kept unless one of them failed or was skipped."""
        try:
            paths = {
                name: find_input(self.inputs[name], self.folders, self.build / "data")
                for name in case.inputs
            }
        except MissingInputError as error:
            return [Row(question=case.name, verdict="skipped", reason=str(error))]
        for package in case.packages:
            if importlib.util.find_spec(package) is None:
                reason = f"the package {package} is not installed"
                return [Row(question=case.name, verdict="skipped", reason=reason)]
        folder = self.build / suite / case.name
        key = _digest(code, str(self.is_quick), *(self.inputs[each].sha256 for each in paths))
        kept = folder / "rows.json"
        if kept.exists() and not self.is_again:
            found = json.loads(kept.read_text(encoding="utf-8"))
            if found["key"] == key:
                return [Row(**row) for row in found["rows"]]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run = Run(is_quick=self.is_quick, paths=paths, folder=folder, label=f"{suite}, {case.name}")
        rows = [self._portable(row) for row in _guarded(case, run)]
        if all(row.verdict not in ("skipped", "failed") for row in rows):
            text = json.dumps({"key": key, "rows": [vars(row) for row in rows]}, ensure_ascii=False)
            kept.write_text(text, encoding="utf-8")
        return rows

    def _portable(self, row: Row) -> Row:
        """Return the row without the folders of this machine."""
        reason = row.reason
        for folder in (*self.folders, self.build):
            reason = reason.replace(f"{folder}/", "")
        return replace(row, reason=reason)


def _guarded(case: Case, run: Run) -> Iterator[Row]:
    """Yield the rows of a case, and a row for the exception that ends it."""
    try:
        yield from case.rows(run)
    except MieError as error:
        yield Row.refused(case.name, str(error))
    except Exception as error:
        yield Row(question=case.name, verdict="failed", reason=f"{type(error).__name__}: {error}")


def code_digest() -> str:
    """Return a digest of mie's files and of the interpreter."""
    package = Path(mie.__file__).parent
    paths = [path for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return _digest(sys.version, platform.machine(), *_contents(paths))


def _sources(suite: Path) -> Iterator[str]:
    yield from _contents([suite, *SUITES.glob("_*.py")])


def _contents(paths: Sequence[Path]) -> Iterator[str]:
    for path in sorted(paths):
        yield hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _report(line: str) -> None:
    start = "\r" if sys.stderr.isatty() else ""
    print(f"{start}{line.rstrip()}", file=sys.stderr, flush=True)


__all__ = ["Runner", "code_digest", "read_suites", "read_table"]
