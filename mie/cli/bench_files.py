"""Files of benchmark results: their provenance, and checks before anything is measured."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mie.base.commands import CommandError, run_command
from mie.base.files import replacing
from mie.base.resources import read_text, usable_cpus
from mie.base.version import __version__
from mie.errors import ConfigError

_PACKAGES = ("numpy", "numba", "cupy")
"""The packages that compute."""

_NOT_SETTINGS = ("run", "json", "output_json", "overwrite", "default_max_tokens")
"""Entries of a command's namespace that do not change a measurement."""


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Return the version, the commit where it is known, the date, the machine and the settings."""
    return {
        "mie": __version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        "settings": {
            name: "inf" if value == math.inf else value
            for name, value in vars(args).items()
            if name not in _NOT_SETTINGS and value is not None
        },
    }


def _commit() -> str | None:
    """Return the commit of the clone that runs, with "-dirty" if files differ from the commit."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    describe = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        return run_command(("git", "-C", str(root), *describe), timeout=10).strip()
    except CommandError:
        return None


def _machine() -> dict[str, Any]:
    """Return the processor and the software that this process runs on."""
    from mie.ops_jit.environment import version_of

    name = re.search(r"^model name\s*: (.*)$", read_text("/proc/cpuinfo") or "", re.MULTILINE)
    return {
        "system": platform.platform(),
        "processor": name[1] if name else platform.machine(),
        "num_cpus": usable_cpus(),
        "python": platform.python_version(),
        "packages": {each: found for each in _PACKAGES if (found := version_of(each)) is not None},
    }


def saved_file(args: argparse.Namespace) -> Path:
    """Return the file of ``--save-result``."""
    return Path(args.result_dir, args.result_filename)


def check_files(args: argparse.Namespace) -> None:
    """Refuse files of results that cannot be written, before anything is measured.

    Raises:
        ConfigError: a folder is missing or read-only, or a file exists without ``--overwrite``.
    """
    targets = {} if args.output_json is None else {"--output-json": Path(args.output_json)}
    if getattr(args, "save_result", False) or getattr(args, "save_detailed", False):
        targets["--save-result"] = saved_file(args)
    if len({path.resolve() for path in targets.values()}) < len(targets):
        raise ConfigError("--output-json and --save-result name one file; name two")
    for option, path in targets.items():
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent} (make it first)")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{option} {path} is not a file; choose another name")
        if path.exists() and not args.overwrite:
            raise ConfigError(f"{option} {path} exists (choose another name, or add --overwrite)")
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(f"{option} {path}: the folder {path.parent} cannot be written")


def write_results(option: str, path: Path, results: Mapping[str, Any]) -> None:
    """Write the results as JSON to the file that ``option`` names, or raise `ConfigError`."""
    with replacing(str(path), option) as file:
        file.write(json.dumps(results, indent=2) + "\n")
