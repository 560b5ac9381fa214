"""Test how mie loads its public names."""

import subprocess
import sys

import pytest

import mie

BREAK = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == {home!r}:
            raise {error}
sys.meta_path.insert(0, Broken())
"""


@pytest.mark.parametrize("name", ["LLM", "SamplingParams", "AsyncLLM", "ToolCall"])
@pytest.mark.parametrize(
    "error",
    ["AttributeError('no __code__')", "ImportError('no __code__')", "OSError('no __code__')"],
)
def test_a_name_that_cannot_be_loaded_is_refused_with_the_cause(name: str, error: str) -> None:
    program = BREAK.format(home=mie._HOMES[name], error=error) + f"from mie import {name}"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 1
    assert "no __code__" in found.stderr.splitlines()[-1]


def test_an_attribute_that_a_module_lacks_is_named_with_the_module(monkeypatch) -> None:
    monkeypatch.setitem(mie._HOMES, "Engine", "mie.errors")
    with pytest.raises(ImportError, match=r"mie\.Engine cannot be loaded: .*'mie\.errors'"):
        from mie import Engine  # noqa: F401
    assert not hasattr(mie, "no_such_name")
