"""Import a client when a test first uses it, because every worker of pytest imports every file.

The official clients take up to two seconds to import.
"""

import importlib.util
import sys
from types import ModuleType

import pytest


def lazy_module(name: str) -> ModuleType:
    """Return a module that is loaded when an attribute is first read, or skip the file."""
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.find_spec(name)
    if found is None or found.loader is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    loader = importlib.util.LazyLoader(found.loader)
    found.loader = loader
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    loader.exec_module(module)
    return module
