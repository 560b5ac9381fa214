"""Check the rooms of `mie`, and a few rules of style that no library checks.

pyproject.toml has the contracts of imports, and `make check` runs import-linter and ruff over them.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import run
from toml_files import read_toml

import mie
from mie.cli import COMMANDS

PACKAGE = Path(mie.__file__).parent
ROOT = Path(__file__).parents[2]
TOOLS = read_toml(ROOT / "pyproject.toml")["tool"]
CONTRACTS = TOOLS["importlinter"]["contracts"]
LAZY = {
    name
    for name in TOOLS["ruff"]["lint"]["flake8-tidy-imports"]["banned-module-level-imports"]
    if not name.startswith("mie.")
}
"""Packages that are optional or slow to import."""
NOT_FOR_A_PROMPT = {
    *("cli.compiling", "cli.doctor", "engine.watch.look", "engine.watch.waiting", "events.replay"),
    *("frontend.async_llm", "lab", "ops_gpu", "page", "ray", "serve"),
}
"""Rooms and modules that "mie generate" with a prompt must not import on the CPU."""

MUTABLE = {"dict", "list", "set", "bytearray", "defaultdict", "Counter", "deque", "OrderedDict"}
MUTATORS = {"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}
CACHES = {"cache", "lru_cache"}


# The contracts of imports.


def test_every_installed_package_has_a_contract():
    """A package that no contract names could be imported anywhere."""
    named = {
        module
        for contract in CONTRACTS
        if contract["type"] == "protected"
        for module in contract["protected_modules"]
    }
    imported = {name for _, _, tree in sources(PACKAGE) for name in packages_of(tree)}
    assert imported - sys.stdlib_module_names - {"mie"} == named - sys.stdlib_module_names


def test_forbidden_imports_break_the_contracts(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "mie", ignore=all_but_python)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = {
        "ops/rope.py": "from mie.sched import plan",
        "sched/queue.py": "def f():\n    import numpy",
        "memory/pool.py": "from random import random",
        "model/decoder.py": "from mie.ops.rope import rope",
        "checkpoint/locate.py": "from mie.model import decoder",
        "text/chat.py": "from mie.checkpoint import hub",
        "serve/app.py": "from mie.engine.engine import Engine",
        "errors.py": "import importlib",
        "base/files.py": "import yaml",
    }
    for file, line in planted.items():
        with (tmp_path / "mie" / file).open("a", encoding="utf-8") as module:
            module.write(f"\n{line}\n")
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    result = run([sys.executable, "-c", program, "--no-cache"], cwd=tmp_path)
    assert result.returncode == 1
    broken = {*re.findall(r"^(.+) BROKEN", result.stdout, re.MULTILINE)}
    names = [contract["name"] for contract in CONTRACTS]
    first = names[: names.index("Arrays stay in their rooms") + 1]
    assert broken == {*first, "Bodies, metrics and the server"}


def all_but_python(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_file() and not name.endswith(".py")]


# State that outlives a call.


def sources(root: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    """Yield (dotted name without "mie.", path, syntax tree) of every module under ``root``."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        yield ".".join(parts), path, ast.parse(path.read_text(encoding="utf-8"))


def packages_of(tree: ast.Module) -> Iterator[str]:
    """Yield the first part of every name that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def nodes_of(node: ast.AST, is_eager: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node, and whether it runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        runs = is_eager and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield child, runs
        yield from nodes_of(child, runs)


def mutable_state(root: Path) -> Iterator[str]:
    """Yield state that outlives a call and belongs to no object."""
    for module, _, tree in sources(root):
        for node, is_eager in nodes_of(tree):
            where = f"{module}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Global):
                yield f"{where} global statement"
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and is_eager:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (t.id for t in targets if isinstance(t, ast.Name)):
                    is_constant = name == name.upper() or name == "__all__"
                    if _is_mutable(node.value) and not is_constant:
                        yield f"{where} {name} is mutable"
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if CACHES & {_last_name(decorator) for decorator in node.decorator_list}:
                    yield f"{where} {node.name} keeps a cache"
                yield from _constants_changed(node, module)


def _is_mutable(value: ast.expr | None) -> bool:
    literals = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
    return isinstance(value, literals) or (
        isinstance(value, ast.Call) and _last_name(value) in MUTABLE
    )


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _constants_changed(function: ast.AST, module: str) -> Iterator[str]:
    for node in ast.walk(function):
        assigned = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        mutated = isinstance(node, ast.Attribute) and node.attr in MUTATORS
        owner = node.value if assigned or mutated else None
        if isinstance(owner, ast.Name) and len(owner.id) > 1 and owner.id.isupper():
            yield f"{module}:{node.lineno} changes {owner.id}"


def test_no_state_of_the_package_outlives_a_call():
    assert list(mutable_state(PACKAGE)) == []


@pytest.mark.parametrize(
    "line",
    [
        "registry = {}",
        "counts = collections.defaultdict(int)",
        "squares = [i * i for i in range(9)]",
        "class Settings:\n    options = {}",
        "def f():\n    global counter\n    counter = 1",
        "@functools.lru_cache(maxsize=None)\ndef f():\n    return 1",
        "TABLE = {}\ndef f():\n    TABLE[1] = 2",
        "TABLE = []\ndef f():\n    TABLE.append(2)",
    ],
)
def test_mutable_state_is_noticed(tmp_path: Path, line: str):
    (tmp_path / "errors.py").write_text(line + "\n")
    assert len(list(mutable_state(tmp_path))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "TABLE = {1: 2}",
        "__all__ = ['a']",
        "pair = (1, 2)",
        "def f():\n    local = []\n    local.append(1)\n    return local",
        "class Pool:\n    def __init__(self):\n        self.free = []",
    ],
)
def test_constants_and_local_variables_pass(tmp_path: Path, line: str):
    (tmp_path / "errors.py").write_text(line + "\n")
    assert list(mutable_state(tmp_path)) == []


# Effects of imports, observed from outside.

RECORDER = """
import json, sys

class Recorder:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        self.asked.add(name)

sys.meta_path.insert(0, Recorder())
"""
REPORT = """
print(json.dumps(sorted(Recorder.asked | set(sys.modules))))
"""


def packages_after(code: str) -> set[str]:
    """Return the packages that a fresh Python has, or tried to import, after running ``code``."""
    return {name.split(".")[0] for name in modules_after(code)}


def modules_after(code: str) -> set[str]:
    """Return the modules that a fresh Python has, or tried to import, after running ``code``."""
    program = RECORDER + code + REPORT
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=PACKAGE.parent,
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


def modules_of_mie_after(code: str) -> set[str]:
    """Return the modules of mie, without "mie.", that a fresh Python has after ``code``."""
    return {name.removeprefix("mie.") for name in modules_after(code) if name.startswith("mie.")}


HEAVY = {"numpy", "ml_dtypes", "tokenizers", "jinja2", "safetensors", "tqdm", *LAZY}


def is_in(module: str, parts: set[str]) -> bool:
    """Return whether a module is one of the rooms or modules, or in one of them."""
    return any(f"{module}.".startswith(f"{part}.") for part in parts)


def test_importing_mie_imports_nothing_else():
    light = {"base", "base.absent", "base.logs", "base.version"}
    assert modules_of_mie_after("import mie") == light
    assert not packages_after("import mie; mie.__version__; dir(mie)") & HEAVY


def test_completing_a_prompt_imports_only_the_rooms_it_needs():
    """Each module that a command does not need delays its first token."""
    command = ["generate", "--temperature", "0", "--max-tokens", "1", "Once upon a time"]
    modules = modules_of_mie_after(f"import mie.cli\nassert mie.cli.main({command}) == 0")
    assert {"cli.generate", "frontend.llm", "ops_jit.jit_backend"} <= modules
    assert not {name for name in modules if is_in(name, NOT_FOR_A_PROMPT)}
    assert not modules & {f"cli.{name}" for name in COMMANDS if name != "generate"}
    tools = {name for name in modules if is_in(name, {"text.tools"})}
    assert tools == {"text.tools", "text.tools.definitions"}


def test_completing_a_prompt_looks_for_no_names_and_packages():
    """Messages with the closest name of another one are made when they are needed."""
    command = ["generate", "--temperature", "0", "--max-tokens", "1", "Once upon a time"]
    modules = modules_after(f"""
import difflib
def refuse(*arguments, **options):
    raise AssertionError("close names are searched")
difflib.get_close_matches = refuse
import mie.cli
assert mie.cli.main({command}) == 0
""")
    assert not modules & {"importlib.metadata", "email.message"}


def test_settings_and_errors_need_no_package():
    code = "from mie import EngineConfig, MieError, SamplingParams; SamplingParams(n=2)"
    assert not packages_after(code) & HEAVY


def test_the_command_line_helps_without_loading_anything():
    code = "import mie.cli\ntry: mie.cli.main(['--help'])\nexcept SystemExit: pass"
    assert not packages_after(code) & HEAVY


def test_generating_on_the_cpu_imports_no_gpu_package(tiny):
    code = f"""
from mie import LLM, SamplingParams
llm = LLM(
    {str(tiny["llama"].directory)!r}, backend="numpy", skip_tokenizer_init=True, num_blocks=4
)
[output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, seed=1), use_tqdm=False)
assert output.outputs[0].token_ids
"""
    packages = packages_after(code)
    assert "numpy" in packages
    assert not packages & (LAZY - {"tqdm"})


def test_generating_with_compiled_kernels_does_not_import_the_compiler():
    """Numba takes a second. It is needed only when a kernel was never compiled."""
    command = ["doctor", "--compile", "--model", "bundled"]
    packages_after(f"import mie.cli\nassert mie.cli.main({command}) == 0")
    command = ["generate", "--backend", "jit", "--temperature", "0", "--max-tokens", "1", "Once"]
    packages = packages_after(
        f"""
import mie.cli
assert mie.cli.main({command}) == 0
assert "numba" not in sys.modules, "it is looked for and not imported"
"""
    )
    assert "llvmlite" in packages
    assert not packages & (LAZY - {"llvmlite", "numba", "tokenizers", "tqdm"})


def test_the_recorder_notices_a_failed_import():
    code = "try: import cupy_that_is_not_there\nexcept ImportError: pass"
    assert "cupy_that_is_not_there" in packages_after(code)
