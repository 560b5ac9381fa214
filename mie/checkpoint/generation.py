"""Read the recommended sampling parameters of a model.

They are in its ``generation_config.json``, or in the metadata of its GGUF file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mie.base.files import read_json_object
from mie.checkpoint.gguf.config import generation_config
from mie.checkpoint.gguf.header import GgufHeader, opened
from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.size_limits import MAX_JSON_BYTES
from mie.errors import ConfigError, ModelError

FILE_NAME = "generation_config.json"

# The keys that are used, as vLLM uses them, and the sampling parameters they set.
_PARAMETERS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}

CONVERSATION: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""The sampling parameters of conversations with a model that recommends none, as in llama.cpp."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Default sampling parameters, by their names in `SamplingParams`, and their source."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    """The end-of-sequence ids of the file, in addition to the model's."""
    source: str = "vllm"
    is_neutral: bool = False
    """Whether the user turned recommendations off."""

    @property
    def recommends(self) -> bool:
        """Whether the model or the user sets sampling parameters."""
        return not CONVERSATION.keys().isdisjoint(self.sampling)

    @property
    def conversation(self) -> Mapping[str, Any]:
        """The default sampling parameters of a conversation.

        A model that recommends none has the values of `CONVERSATION`: few small models stay
        sensible at temperature 1 with the whole vocabulary.
        """
        if self.is_neutral or self.recommends:
            return self.sampling
        return {**CONVERSATION, **self.sampling}

    @classmethod
    def load(
        cls,
        directory: Path | GgufHeader,
        where: str | os.PathLike[str] = "auto",
        overrides: Mapping[str, Any] | None = None,
    ) -> GenerationConfig:
        """Load the generation config of the model in ``directory``. The file need not exist.

        ``where`` is "auto", the model's own; "vllm", none; or a directory that must have the file.
        ``overrides`` replace keys of the file.

        Raises:
            ConfigError: an override is not a supported key.
            ModelError: the file is missing or broken, or has ids of a wrong kind.
        """
        overrides = overrides or {}
        for key in overrides.keys() - _PARAMETERS.keys():
            known = ", ".join(_PARAMETERS)
            raise ConfigError(f"override_generation_config has no key {key!r}; it takes {known}")
        file = None if where == "vllm" else _file(opened(directory), where)
        path = file.path if isinstance(file, GgufHeader) else file
        values = {} if file is None else _read(file)
        return cls(
            sampling={
                name: value
                for key, name in _PARAMETERS.items()
                if (value := {**values, **overrides}.get(key)) is not None
            },
            eos_token_ids=JsonReader(values=values, source=str(path)).token_ids("eos_token_id"),
            source=_source(path, overrides),
            is_neutral=where == "vllm",
        )


def _file(model: Path | GgufHeader, where: str | os.PathLike[str]) -> Path | GgufHeader | None:
    if where == "auto":
        if isinstance(model, GgufHeader):
            return model
        path = model / FILE_NAME
        return path if path.exists() else None
    path = Path(where).expanduser() / FILE_NAME
    if not path.exists():
        raise ModelError(
            f"generation_config {os.fspath(where)!r} is not a directory with a {FILE_NAME}; pass "
            "'auto', 'vllm' or such a directory"
        )
    return path


def _read(file: Path | GgufHeader) -> dict[str, Any]:
    if isinstance(file, GgufHeader):
        return generation_config(file)
    return read_json_object(file, MAX_JSON_BYTES, ModelError)


def _source(path: Path | None, overrides: Mapping[str, Any]) -> str:
    file = [] if path is None else [str(path)]
    return " and ".join([*file, *(["override_generation_config"] if overrides else [])]) or "vllm"
