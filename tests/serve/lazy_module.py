"""Import a client when a test first uses it, because every worker of pytest imports every file.

The official clients take up to two seconds to import.
"""

import importlib
import importlib.util
from typing import Any

import pytest


class LazyModule:
    """Stands for a module, which is imported when a public name of it is first read.

    `importlib.util.LazyLoader` would import it as soon as pytest looks for fixtures among a file's
    names.
    """

    def __init__(self, name: str) -> None:
        self._module_name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module_name), name)


def lazy_module(name: str) -> Any:
    """Return a module that is imported when it is first used, or skip the file."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return LazyModule(name)
