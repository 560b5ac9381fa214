"""Read the public names of vLLM's offline API from its wheel, without importing it.

    pip download --no-deps vllm && unzip -q vllm-*.whl -d unpacked
    python scripts/vllm_names.py unpacked

The names are written to ``docs/vllm.json``: those of modules, the members of classes and the
parameters of methods, and the defaults that are plain values. Then run ``scripts/doc_tables.py``.
"""

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "docs" / "vllm.json"

MODULES = {
    "vllm": "__init__.py",
    "vllm.inputs": "inputs/__init__.py",
    "vllm.sampling_params": "sampling_params.py",
    "vllm.pooling_params": "pooling_params.py",
    "vllm.outputs": "outputs.py",
    "vllm.logprobs": "logprobs.py",
    "vllm.lora.request": "lora/request.py",
}
CLASSES = {
    "LLM": (
        ("entrypoints/llm.py", "LLM"),
        ("entrypoints/common/offline.py", "OfflineInferenceMixin"),
        ("entrypoints/generate/beam_search/offline.py", "BeamSearchOfflineMixin"),
        ("entrypoints/pooling/offline.py", "PoolingOfflineMixin"),
        ("entrypoints/rl/offline.py", "RLOfflineMixin"),
    ),
    "AsyncLLM": (("v1/engine/async_llm.py", "AsyncLLM"), ("engine/protocol.py", "EngineClient")),
    "LLMEngine": (("v1/engine/llm_engine.py", "LLMEngine"),),
    "EngineArgs": (("engine/arg_utils.py", "EngineArgs"),),
    "AsyncEngineArgs": (("engine/arg_utils.py", "AsyncEngineArgs"),),
    "SamplingParams": (("sampling_params.py", "SamplingParams"),),
    "BeamSearchParams": (("sampling_params.py", "BeamSearchParams"),),
    "StructuredOutputsParams": (("sampling_params.py", "StructuredOutputsParams"),),
    "RequestOutputKind": (("sampling_params.py", "RequestOutputKind"),),
    "RequestOutput": (("outputs.py", "RequestOutput"),),
    "CompletionOutput": (("outputs.py", "CompletionOutput"),),
    "RequestMetrics": (("v1/metrics/stats.py", "RequestStateStats"),),
    "Logprob": (("logprobs.py", "Logprob"),),
    "TextPrompt": (("inputs/llm.py", "TextPrompt"), ("inputs/llm.py", "_PromptOptions")),
    "TokensPrompt": (("inputs/llm.py", "TokensPrompt"), ("inputs/llm.py", "_PromptOptions")),
}
"""Where a class and its bases are. mie's name of ``RequestStateStats`` is `RequestMetrics`."""

CALLABLE = ("LLM", "AsyncLLM", "LLMEngine", "SamplingParams", "BeamSearchParams")
"""Classes whose methods' parameters are listed."""

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Wheel:
    """The sources of vLLM in an unpacked wheel."""

    def __init__(self, unpacked: Path) -> None:
        [info] = unpacked.glob("vllm-*.dist-info")
        self.version = info.name.removeprefix("vllm-").removesuffix(".dist-info")
        self.package = unpacked / "vllm"
        nodes = [
            node
            for path in sorted((self.package / "config").glob("*.py"))
            for node in ast.parse(path.read_text(encoding="utf-8")).body
        ]
        self._configs = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        self._constants = {
            ast.unparse(node.targets[0]): node.value
            for node in nodes
            if isinstance(node, ast.Assign)
        }

    def tree(self, path: str) -> ast.Module:
        """Return the syntax tree of a file of the package."""
        return ast.parse((self.package / path).read_text(encoding="utf-8"))

    def classes(self, owner: str) -> list[ast.ClassDef]:
        """Return a class of `CLASSES` and its bases."""
        return [
            node
            for path, name in CLASSES[owner]
            for node in self.tree(path).body
            if isinstance(node, ast.ClassDef) and node.name == name
        ]

    def plain(self, value: ast.expr) -> Any:
        """Return the value of a default, or of the config's field that it names.

        Raises:
            ValueError: it is not a plain value.
        """
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            return self._of_config(value.value.id, value.attr)
        if isinstance(value, ast.Name) and value.id in self._constants:
            return self.plain(self._constants[value.id])
        if isinstance(value, ast.Call):
            name = ast.unparse(value.func)
            if name == "get_field":
                return self._of_config(ast.unparse(value.args[0]), ast.literal_eval(value.args[1]))
            given = {each.arg: each.value for each in value.keywords}
            if name in ("Field", "field") and "default" in given:
                return self.plain(given["default"])
            if name == "Field" and value.args:
                return self.plain(value.args[0])
        return ast.literal_eval(value)

    def _of_config(self, config: str, name: str) -> Any:
        for node in self._configs[config].body if config in self._configs else ():
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if ast.unparse(target) == name:
                    return self.plain(node.value)
        raise ValueError(f"{config}.{name} has no plain default")


def exported(tree: ast.Module) -> list[str]:
    """Return ``__all__`` of a module, or its public classes."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def members(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the public fields and methods of a class, with the defaults of fields."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign):
            yield ast.unparse(each.target), each.value
        elif isinstance(each, ast.Assign):
            yield ast.unparse(each.targets[0]), None
        elif isinstance(each, Function) and each.name != "__init__":
            yield each.name, None
        elif isinstance(each, Function):
            for target in ast.walk(each):
                if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                    yield from [(target.attr, None)] if ast.unparse(target.value) == "self" else []


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the names of a function's parameters, except for ``self`` and ``cls``."""
    found = function.args
    for each in (*found.posonlyargs, *found.args, *found.kwonlyargs):
        if each.arg not in ("self", "cls"):
            yield each.arg


def collected(wheel: Wheel) -> dict[str, Any]:
    """Return all names by owner: a module, a class, or a method as ``Class.method``."""
    names: dict[str, list[str]] = {
        module: sorted(exported(wheel.tree(path))) for module, path in MODULES.items()
    }
    defaults: dict[str, dict[str, Any]] = {}
    for owner in CLASSES:
        found: dict[str, ast.expr | None] = {}
        for node in wheel.classes(owner):
            found = {**dict(members(node)), **found}
            for each in node.body if owner in CALLABLE else ():
                is_public = isinstance(each, Function) and not each.name.startswith("_")
                is_llm = isinstance(each, Function) and (owner, each.name) == ("LLM", "__init__")
                if isinstance(each, Function) and (is_public or is_llm):
                    listed = names.setdefault(f"{owner}.{each.name}", [])
                    listed += [name for name in parameters(each) if name not in listed]
        names[owner] = sorted(name for name in found if not name.startswith("_"))
        defaults[owner] = {
            name: value
            for name, node_ in sorted(found.items())
            if node_ is not None and not name.startswith("_")
            for value in _plain_values(wheel, node_)
        }
    return {
        "vllm": wheel.version,
        "names": {owner: each for owner, each in sorted(names.items()) if each},
        "defaults": {owner: each for owner, each in sorted(defaults.items()) if each},
    }


def _plain_values(wheel: Wheel, default: ast.expr) -> list[Any]:
    """Return the default as a list of one JSON value, or of none if it is not plain."""
    try:
        value = wheel.plain(default)
        json.dumps(value)
    except (ValueError, TypeError):
        return []
    return [value]


def main() -> None:
    """Write the names."""
    parser = argparse.ArgumentParser(description="Read the names of vLLM's offline API.")
    parser.add_argument("unpacked", type=Path, help="directory of an unpacked wheel of vLLM")
    wheel = Wheel(parser.parse_args().unpacked)
    text = json.dumps(collected(wheel), indent=1, sort_keys=False)
    DATA.write_text(text + "\n", encoding="utf-8")
    print(f"wrote the names of vLLM {wheel.version}")


if __name__ == "__main__":
    main()
