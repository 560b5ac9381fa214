"""Test how mie loads its public names."""

import importlib
import pkgutil
import sys

import pytest
from deadlines import run

import mie
from mie.base.refusals import REFUSED
from mie.cli import main
from mie.errors import UnsupportedImportError

MODULES = REFUSED["modules"]

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
    found = run([sys.executable, "-c", program])
    assert found.returncode == 1
    assert "no __code__" in found.stderr.splitlines()[-1]


def test_an_attribute_that_a_module_lacks_is_named_with_the_module(monkeypatch) -> None:
    monkeypatch.setitem(mie._HOMES, "Engine", "mie.errors")
    with pytest.raises(ImportError, match=r"mie\.Engine cannot be loaded: .*'mie\.errors'"):
        from mie import Engine  # noqa: F401
    assert not hasattr(mie, "no_such_name")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_of_vllm_is_refused_with_the_remedy(module: str) -> None:
    for name in (f"mie.{module}", f"mie.{module}.inner"):
        with pytest.raises(UnsupportedImportError) as error:
            importlib.import_module(name)
        assert str(error.value).endswith(MODULES[module])


def test_a_module_that_nobody_has_is_missing_as_usual() -> None:
    for name in ("mie.no_such_module", "mie.engine.no_such_module", "miev1"):
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            importlib.import_module(name)


def test_no_module_of_mie_is_refused() -> None:
    own = {each.name.partition(".")[2] for each in pkgutil.walk_packages(mie.__path__, "mie.")}
    assert not own & MODULES.keys()


@pytest.mark.parametrize("backend", ["vllm", "openai", "openai-chat"])
def test_the_kinds_of_servers_in_vllms_benchmark_get_the_remedy(backend: str, capsys) -> None:
    command = ["bench", "serve", "--dataset-name", "random", "--backend", backend]
    assert main(command) == 2
    assert "vllm bench serve or guidellm" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sharegpt", "sonnet", "hf", ""])
def test_other_datasets_of_vllms_benchmark_get_the_remedy(name: str, capsys) -> None:
    assert main(["bench", "serve", "--dataset-name", name]) == 2
    assert "write random, or give a file with --workload" in capsys.readouterr().err
