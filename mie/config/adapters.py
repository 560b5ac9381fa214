"""Name adapters: requests for an adapter, and the adapters that are loaded at start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mie.config.params.values import integer
from mie.errors import ConfigError, shown

MAX_NAME_CHARS = 256


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by name, number and path, as in vLLM::

        llm = LLM("bundled", enable_lora=True)
        llm.generate("Once upon a time", lora_request=LoRARequest("poet", 1, "adapters/poet"))

    The first request of an adapter loads it. Name and number are each of one adapter.

    Raises:
        ConfigError: a field is not allowed.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    """A directory of PEFT, or a GGUF file."""

    def __post_init__(self) -> None:
        for name, longest in (("lora_name", MAX_NAME_CHARS), ("lora_path", 4096)):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= longest:
                raise ConfigError(
                    f"{name} must be a string of 1 … {longest} characters; got {shown(value)}"
                )
        integer("lora_int_id", self.lora_int_id, 1)

    # vLLM's other names of the fields.

    @property
    def name(self) -> str:
        """The name."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The number."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """The path."""
        return self.lora_path


def lora_modules_of(value: Any) -> dict[str, LoRARequest]:
    """Return the adapters of the setting ``lora_modules`` by name, with numbers from 1 on.

    The setting is a mapping, or a list of ``name=path`` and of vLLM's objects with ``name`` and
    ``path``.

    Raises:
        ConfigError: the value is none of these, or has a name twice.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Mapping | list | tuple):
        raise ConfigError(f"lora_modules must map names to paths; got {shown(value)}")
    pairs = [*value.items()] if isinstance(value, Mapping) else [*map(_pair, value)]
    adapters: dict[str, LoRARequest] = {}
    for number, (name, path) in enumerate(pairs, start=1):
        adapter = LoRARequest(name, number, path)
        if name in adapters:
            raise ConfigError(f"lora_modules has the name {name!r} twice (choose another)")
        adapters[name] = adapter
    return adapters


def _pair(module: Any) -> tuple[Any, Any]:
    """Return the name and the path of an entry of a list."""
    if isinstance(module, str) and module.lstrip().startswith("{"):
        try:
            module = json.loads(module)
        except ValueError as error:
            raise ConfigError(f"lora_modules has {shown(module)}, no JSON: {error}") from error
    if isinstance(module, Mapping):
        others = module.keys() - {"name", "path", "base_model_name"}
        if not others and {"name", "path"} <= module.keys():
            return module["name"], module["path"]
    elif isinstance(module, str) and "=" in module:
        name, _, path = module.partition("=")
        return name, path
    raise ConfigError(
        f"lora_modules has {shown(module)}; an adapter is name=path, or an object with name and "
        "path"
    )
