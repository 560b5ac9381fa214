"""Check the rooms of `mie`, their allowed imports, and a few rules of style.

rooms.toml has a line for every room (a folder of mie/ or a file beside them).
"""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import mie
from mie.cli import COMMANDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(mie.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Room:
    """The allowed imports of a room: rooms or single modules of mie, and installed packages."""

    mie: set[str]
    packages: set[str]


TABLE = tomllib.loads(Path(__file__).with_name("rooms.toml").read_text())
ROOMS = {
    name: Room(mie={*names}, packages={*TABLE["packages"].get(name, ())})
    for name, names in TABLE["rooms"].items()
}
LAZY, LAZY_ROOMS, IMPORTERS, NOT_FOR_A_PROMPT = (
    {*TABLE["lists"][name]} for name in ("lazy", "lazy_rooms", "importers", "not_for_a_prompt")
)

NO_CLOCK = {"sched": {"time", "datetime", "random"}, "memory": {"time", "datetime", "random"}}
"""Standard modules that would make a room's results depend on more than its input."""

MUTABLE = {"dict", "list", "set", "bytearray", "defaultdict", "Counter", "deque", "OrderedDict"}
MUTATORS = {"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}
CACHES = {"cache", "lru_cache"}

EXCUSED: set[tuple[str, str]] = set()  # (module, name)


# Reading a tree of sources.


def sources(root: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    """Yield (dotted name without "mie.", path, syntax tree) of every module under ``root``."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        yield ".".join(parts), path, tree_of(path.read_text())


@functools.cache  # each rule reads all files
def tree_of(text: str) -> ast.Module:
    return ast.parse(text)


def room_of(module: str) -> str:
    return module.split(".")[0]


def is_in(module: str, parts: set[str]) -> bool:
    """Return whether a module is one of the rooms or modules, or in one of them."""
    return any(f"{module}.".startswith(f"{part}.") for part in parts)


@dataclass(frozen=True, kw_only=True)
class Import:
    """An imported name, such as "numpy.typing". It is eager if it runs with the module."""

    name: str
    line: int
    is_eager: bool


def imports(tree: ast.Module, module: str, root: Path) -> Iterator[Import]:
    for node, is_eager in _walk(tree, True):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, root)
            names = [_submodule(f"{base}.{alias.name}", root) or base for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name=name, line=node.lineno, is_eager=is_eager)


def _walk(node: ast.AST, is_eager: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node, and whether it runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        runs = is_eager and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            runs = False
        yield child, runs
        yield from _walk(child, runs)


def _absolute(node: ast.ImportFrom, module: str, root: Path) -> str:
    if node.level == 0:
        return node.module or ""
    is_package = (root / Path(*module.split(".")) / "__init__.py").exists()
    parts = ["mie", *([] if module == "__init__" else module.split("."))]
    drop = node.level - (is_package or module == "__init__")
    return ".".join([*parts[: len(parts) - drop], *filter(None, [node.module])])


def _submodule(name: str, root: Path) -> str | None:
    """Return ``name`` if it is a module of mie, else None."""
    if not name.startswith("mie."):
        return None
    path = root / Path(*name.split(".")[1:])
    return name if path.is_dir() or path.with_suffix(".py").exists() else None


# The rules. Each yields a sentence for each violation.


def arrows(root: Path) -> Iterator[str]:
    """Yield imports that a room may not make."""
    for module, _, tree in sources(root):
        room = room_of(module)
        if room not in ROOMS:
            yield f"{module}: room {room!r} is not in the table"
            continue
        for found in imports(tree, module, root):
            top, _, rest = found.name.partition(".")
            where = f"{module}:{found.line}"
            if top == "mie":
                own = room_of(rest) == room and bool(rest)
                if not own and not is_in(rest, ROOMS[room].mie):
                    yield f"{where} {room} may not know {found.name}"
                is_lazy = room_of(rest) in LAZY_ROOMS and room not in LAZY_ROOMS
                if is_lazy and found.is_eager:
                    yield f"{where} {found.name} must be imported inside a function"
            elif top in sys.stdlib_module_names:
                if top in NO_CLOCK.get(room, ()):
                    yield f"{where} {room} may not read {top}"
                if top == "importlib" and module not in IMPORTERS:
                    yield f"{where} {room} hides an import"
            elif top not in ROOMS[room].packages:
                yield f"{where} {room} may not import {top}"
            elif top in LAZY and found.is_eager and room not in LAZY_ROOMS:
                yield f"{where} {top} must be imported inside a function"


def mutable_state(root: Path) -> Iterator[str]:
    """Yield state that outlives a call and belongs to no object."""
    for module, _, tree in sources(root):
        for node, is_eager in _walk(tree, True):
            where = f"{module}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Global):
                yield f"{where} global statement"
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and is_eager:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (t.id for t in targets if isinstance(t, ast.Name)):
                    is_constant = name == name.upper() or name == "__all__"
                    if (
                        _is_mutable(node.value)
                        and not is_constant
                        and (module, name) not in EXCUSED
                    ):
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


RULES = [arrows, mutable_state]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_follows_the_rule(rule):
    assert list(rule(PACKAGE)) == []


# The table itself.


def test_the_table_names_exactly_the_existing_rooms():
    assert {room_of(module) for module, _, _ in sources(PACKAGE)} == ROOMS.keys()


def test_the_arrows_of_the_table_go_down():
    """Each room may import only rooms above it in the table."""
    order = [room for room in ROOMS if room != "__init__"]
    for position, room in enumerate(order):
        assert {room_of(name) for name in ROOMS[room].mie} <= set(order[:position]), room


def test_only_the_wiring_and_the_edges_import_the_engine():
    knows = {room for room, may in ROOMS.items() if "engine" in may.mie}
    assert knows == {"load", "frontend", "lab", "__init__"}


def test_arrays_stay_in_their_rooms():
    known = {room for room, may in ROOMS.items() if "numpy" in may.packages}
    assert known == {"ops", "ops_gpu", "ops_jit", "checkpoint", "model", "engine", "lab"}


# The rules can fail.


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small tree that follows every rule."""
    files = {
        "__init__.py": '"""The package."""\n',
        "errors.py": '"""Errors."""\n\nclass MieError(Exception):\n    """Base."""\n',
        "ops/__init__.py": '"""The operators."""\n',
        "ops/rope.py": '"""Rotation."""\nimport numpy as np\nfrom mie.errors import MieError\n',
        "sched/__init__.py": '"""The scheduler."""\n',
        "sched/plan.py": '"""A plan."""\nfrom mie.memory import pool\nimport math\n',
        "memory/__init__.py": '"""Blocks."""\n',
        "memory/pool.py": '"""A pool."""\n',
        "model/__init__.py": '"""The model."""\n',
        "model/decoder.py": '"""A decoder."""\nfrom mie.ops.backend import Backend\n',
        "checkpoint/__init__.py": '"""Model directories."""\n',
        "checkpoint/locate.py": '"""Find one."""\n',
        "engine.py": '"""The engine."""\n',
    }
    for name, text in files.items():
        path = tmp_path / "mie" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "mie"


def test_a_package_that_follows_every_rule_passes(house: Path):
    assert [sentence for rule in RULES for sentence in rule(house)] == []


@pytest.mark.parametrize(
    ("name", "line", "sentence"),
    [
        ("ops/rope.py", "from mie.sched import plan", "ops may not know mie.sched.plan"),
        ("ops/rope.py", "from ..sched import plan", "ops may not know mie.sched.plan"),
        ("ops/rope.py", "from .. import engine", "ops may not know mie.engine"),
        ("ops/rope.py", "def f():\n    import mie.sched", "ops may not know mie.sched"),
        ("ops/rope.py", "from mie import LLM", "ops may not know mie"),
        ("ops/rope.py", "import torch", "ops may not import torch"),
        ("sched/plan.py", "from numpy.typing import NDArray", "sched may not import numpy"),
        ("sched/plan.py", "import time", "sched may not read time"),
        ("memory/pool.py", "from random import random", "memory may not read random"),
        ("model/decoder.py", "from mie.ops.rope import rope", "model may not know mie.ops.rope"),
        ("checkpoint/locate.py", "import huggingface_hub", "must be imported inside a function"),
        ("errors.py", "import importlib", "errors hides an import"),
        ("attic.py", '"""New."""', "room 'attic' is not in the table"),
    ],
)
def test_a_forbidden_import_is_noticed(house: Path, name: str, line: str, sentence: str):
    with (house / name).open("a") as file:
        file.write(line + "\n")
    [found] = arrows(house)
    assert sentence in found


def test_an_import_for_type_checkers_counts_but_is_not_eager(house: Path):
    lines = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import huggingface_hub\n"
    (house / "checkpoint/locate.py").write_text(lines + "    from mie.memory import pool\n")
    assert list(arrows(house)) == ["checkpoint.locate:4 checkpoint may not know mie.memory.pool"]


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
def test_mutable_state_is_noticed(house: Path, line: str):
    (house / "errors.py").write_text(line + "\n")
    assert len(list(mutable_state(house))) == 1


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
def test_constants_and_local_variables_pass(house: Path, line: str):
    (house / "errors.py").write_text(line + "\n")
    assert list(mutable_state(house)) == []


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
