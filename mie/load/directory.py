"""Find the models of a folder, describe them, and measure them before they are loaded."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mie.checkpoint.config import load_model_config
from mie.checkpoint.gguf.files import gguf_files, shards
from mie.checkpoint.safetensors_header import weights_digest
from mie.checkpoint.tensors import num_parameters
from mie.config.engine_args import EngineArgs
from mie.errors import ChatTemplateError, ConfigError, shown
from mie.load.backends import choose_backend, load_backend
from mie.load.opened import open_model
from mie.load.settings import LoadSettings
from mie.load.sizing import plan_memory
from mie.text.template_files import TemplateFiles

logger = logging.getLogger(__name__)

SHARE = 0.8
"""The share of the available memory that models may take by default."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """Facts about a model from its files."""

    directories: tuple[Path, ...]
    """Where they are: a folder, or a GGUF file."""
    architecture: str
    num_parameters: int
    max_model_len: int
    vocab_size: int
    dtype: str
    quantization: str | None
    weights_bytes: int
    """Bytes of the files."""
    digest: str
    """Differs for other weights."""
    template_text: str
    """The chat template, or nothing."""
    created: int
    """When the files changed last, in seconds of the Unix epoch."""


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """The memory that a model takes, and the settings with which it takes that much."""

    num_bytes: int
    settings: Mapping[str, Any]
    """Arguments of `EngineArgs`."""


class ModelsDirectory:
    """A folder of models: GGUF files, and folders in Hugging Face format.

    A GGUF model in several files has a folder of its own, and the folder's name.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], memory_bytes: int | None = None
    ) -> None:
        """``settings`` are arguments of `EngineArgs` for every model.

        ``memory_bytes`` is for all models together, and by default `SHARE` of the memory that is
        available now.

        Raises:
            ConfigError: the folder cannot be read, or a setting does not fit several models.
        """
        args = EngineArgs(**settings)
        config = args.engine_config()
        self.folder = folder
        self.max_num_seqs = config.max_num_seqs
        """The sequences of each model that run at once."""
        self._settings = dict(settings)
        self._unnamed: set[str] = set()
        try:
            self.find()
        except OSError as error:
            raise ConfigError(
                f"models_dir: cannot read {folder}: {error.strerror or error} (name a folder of "
                "GGUF files and of folders in Hugging Face format)"
            ) from error
        if args.backend == "cupy" and config.num_blocks == config.kv_cache_memory_bytes is None:
            raise ConfigError(
                "models_dir with backend cupy needs kv_cache_memory_bytes or num_blocks: by "
                "default, the cache of one model fills the GPU"
            )
        if memory_bytes is None:
            memory = load_backend(args.backend, args.dtype_name, config).memory()
            memory_bytes = int(SHARE * memory.available_bytes)
        self.memory_bytes = memory_bytes
        """The bytes that all loaded models may take together."""

    def find(self) -> dict[str, Path]:
        """Return the models of the folder by name.

        Raises:
            OSError: the folder cannot be read.
        """
        found: dict[str, Path] = {}
        for path in sorted(self.folder.iterdir()):
            with suppress(OSError):  # a file that this user may not read
                if not path.name.startswith("."):
                    found.update(_models_at(path))
        for name, path in gguf_files(self.folder).items():
            found[path.name if name in found else name] = path
        return {name: path for name, path in found.items() if self._can_be_named(name)}

    def _can_be_named(self, name: str) -> bool:
        """Return whether a request can have this name. The log gets each that no request can."""
        try:
            name.encode()
        except UnicodeEncodeError:
            if name not in self._unnamed:
                self._unnamed.add(name)
                logger.warning(
                    "the model %s is left out: its name is not UTF-8 (rename it)", shown(name)
                )
            return False
        return True

    def describe(self, path: Path) -> ModelFiles:
        """Return the facts in the files of a model.

        Raises:
            ModelError: it cannot be used.
        """
        model = load_model_config(path, EngineArgs(**self._settings).hf_overrides)
        try:
            template, _ = TemplateFiles(path).read()
        except ChatTemplateError:
            template = ""
        is_folder = path.is_dir()
        files = [*path.glob("*.safetensors")] if is_folder else shards(path)
        newest = max(file.stat().st_mtime for file in (*files, path))
        return ModelFiles(
            directories=(path,),
            architecture=model.architecture,
            num_parameters=num_parameters(model),
            max_model_len=model.context_length,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
            quantization=model.quantisation.method if model.quantisation else None,
            weights_bytes=sum(file.stat().st_size for file in files),
            digest=weights_digest(path),
            template_text=template,
            created=int(newest),
        )

    def plan(self, path: Path) -> PlannedModel:
        """Return the memory that a model takes. No other model of the folder changes it.

        Raises:
            ConfigError: a setting does not fit the model or the machine.
            ModelError: it cannot be used.
        """
        args = EngineArgs(**{**self._settings, "model": str(path)})
        settings = LoadSettings.of(args)
        config = settings.engine
        opened = open_model(path, settings, load_model_config(path, args.hf_overrides))
        backend = choose_backend(opened, settings).backend
        of_each = self.memory_bytes // settings.tensor_parallel_size
        memory = replace(backend.memory(), available_bytes=of_each)
        plan = plan_memory(config, opened.config, backend, opened.forms, memory)
        own: dict[str, Any] = {"model": str(path)}
        if config.num_blocks is None:
            own["kv_cache_memory_bytes"] = plan.num_blocks * plan.block_bytes
        if plan.num_states:
            own["state_memory"] = plan.num_states * plan.state_bytes
        if plan.host_bytes:
            own["swap_space"] = plan.host_bytes
        return PlannedModel(num_bytes=plan.total_bytes, settings={**self._settings, **own})


def _models_at(path: Path) -> dict[str, Path]:
    """Return the models of a folder in a folder of models: one, or several GGUF files."""
    if (path / "config.json").is_file():
        return {path.name: path}
    files = gguf_files(path)
    names = [path.name] if len(files) == 1 else [f"{path.name}/{name}" for name in files]
    return dict(zip(names, files.values(), strict=True))
