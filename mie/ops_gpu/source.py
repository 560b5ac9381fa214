"""Assemble the kernels' source text for NVRTC."""

import re
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"

NVRTC_OPTIONS = ("-std=c++17",)
"""The options of every compilation, besides the architecture and `CUPY_OPTIONS`."""

CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")
"""The options that CuPy adds for its own kernels, with which these were measured and checked."""

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


def flat_source(path: Path) -> str:
    """Return the file with our own headers in place of their #include lines.

    The text is the key of the cache of compiled kernels, so that a change of a header counts.
    """
    return _flatten(path, set())


def _flatten(path: Path, seen: set[str]) -> str:
    seen.add(path.name)
    text = path.read_text(encoding="utf-8").replace("#pragma once\n", "\n")

    def included(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return ""
        line = text.count("\n", 0, match.start()) + 2
        beside = path.parent / name
        header = beside if beside.exists() else KERNELS / name
        return f'{_flatten(header, seen)}\n#line {line} "{path.name}"'

    return f'#line 1 "{path.name}"\n' + _INCLUDE.sub(included, text)
