"""Load the parts of `LLM` and `AsyncLLM` from `EngineArgs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mie.base.refusals import refuses_names
from mie.checkpoint.config import load_model_config
from mie.checkpoint.generation import GenerationConfig
from mie.checkpoint.gguf.header import opened
from mie.checkpoint.locate import locate_model
from mie.checkpoint.safetensors_header import weights_digest
from mie.config.engine_args import EngineArgs
from mie.config.params.sampling import SamplingParams
from mie.engine.engine import Engine
from mie.errors import ConfigError, ModelError, TooLittleMemoryError
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.model.config import ModelConfig
from mie.structured.grammars import Grammars
from mie.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """A loaded model: its engine, its tokenizer, and the contents of its files."""

    directory: Path
    text_directory: Path
    """The directory of the tokenizer and the chat template."""
    model: ModelConfig
    """The configuration, including the ``eos_token_ids`` of generation config and tokenizer."""
    tokenizer: Tokenizer | None
    grammars: Grammars | None
    """Grammars of structured outputs, or None without a tokenizer."""
    engine: Engine
    generation: GenerationConfig
    """The default sampling parameters: ``SamplingParams(**generation.sampling)``."""


@refuses_names
@dataclass(frozen=True, kw_only=True)
class LoadedModelConfig(ModelConfig):
    """Sizes and flags of a loaded model, with the names that programs for vLLM read."""

    max_model_len: int
    """Maximum number of tokens in a prompt and its answer together, in the engine."""

    @classmethod
    def of(cls, model: ModelConfig, max_model_len: int) -> LoadedModelConfig:
        """Return the configuration of a model with this context of its engine."""
        return cls(**vars(model), max_model_len=max_model_len)

    def get_vocab_size(self) -> int:
        """Return the number of token ids."""
        return self.vocab_size

    def get_hidden_size(self) -> int:
        """Return the size of hidden states."""
        return self.hidden_size

    def get_head_size(self) -> int:
        """Return the size of an attention head."""
        return self.head_dim


def load_parts(args: EngineArgs) -> Parts:
    """Load the model that ``args`` describe.

    The configuration, the tokenizer and the default sampling parameters are read before the
    weights, because they load fast and may be wrong.

    Raises:
        ConfigError: a setting does not fit the model or the machine.
        ModelError: the model cannot be used; nothing stays loaded.
    """
    try:
        parts = _load_parts(args)
        _return_freed_memory()  # 70 MB of 490 after the first load of Gemma 3 270M
        return parts
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        raise TooLittleMemoryError(
            f"not enough memory to load {args.model}: {error or 'an allocation failed'} (end other "
            "programs, or raise the limits of this process: ulimit -v, ulimit -d, ulimit -u)"
        ) from error


def _load_parts(args: EngineArgs) -> Parts:
    if args.loras and not args.enable_lora:
        raise ConfigError("lora_modules needs enable_lora=True; got False")
    directory, text_directory = _locate(args)
    files = opened(directory)
    model = load_model_config(files, args.hf_overrides)
    tokenizer = None
    if not args.skip_tokenizer_init:
        text_files = files if text_directory == directory else text_directory
        tokenizer = Tokenizer.load(text_files, model.vocab_size)
    generation = GenerationConfig.load(
        files, args.generation_config, args.override_generation_config
    )
    _check_sampling(generation.sampling, generation.source)
    model = replace(model, eos_token_ids=_eos_token_ids(model, generation, tokenizer))
    grammars = None
    if tokenizer is not None:
        grammars = Grammars(tokenizer, model.vocab_size, model.eos_token_ids)
    engine = load_engine(
        files,
        LoadSettings.of(args),
        model=model,
        constraints=grammars,
        trace=args.trace,
        use_tqdm=args.use_tqdm_on_load,
    )
    return Parts(
        directory=directory,
        text_directory=text_directory,
        model=model,
        tokenizer=tokenizer,
        grammars=grammars,
        engine=engine,
        generation=generation,
    )


def digest_of_weights(args: EngineArgs, directory: Path) -> str:
    """Return a digest of the weights that ``args`` loaded. Few bytes are read.

    Raises:
        WeightsError: the files of the weights cannot be read any more.
    """
    digest = f"random {args.seed}" if args.load_format == "dummy" else weights_digest(directory)
    forms = [each for each in (args.quantization, args.head_dtype) if each not in (None, "auto")]
    return " ".join([digest, *forms])


def _return_freed_memory() -> None:
    """Return memory that was freed to the system. The allocator of glibc keeps some of it."""
    import ctypes  # which `mie --help` does not need

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _locate(args: EngineArgs) -> tuple[Path, Path]:
    """Return the directories of the model and of its tokenizer."""
    directory = locate_model(
        args.model,
        revision=args.revision,
        cache_dir=args.download_dir,
        needs_weights=args.load_format != "dummy",
    )
    if args.tokenizer is None and args.tokenizer_revision in (None, args.revision):
        return directory, directory
    text_directory = locate_model(
        args.model if args.tokenizer is None else args.tokenizer,
        revision=args.tokenizer_revision,
        cache_dir=args.download_dir,
        needs_weights=False,
    )
    return directory, text_directory


def _check_sampling(values: Mapping[str, Any], source: str) -> None:
    try:
        SamplingParams(**values)
    except ConfigError as error:
        remedy = "correct it, or pass generation_config='vllm' to ignore the file"
        raise ConfigError(f"{source}: {error} ({remedy})") from error


def _eos_token_ids(
    model: ModelConfig, generation: GenerationConfig, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Return every id that ends a text, each once."""
    for token_id in generation.eos_token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise ModelError(
                f"{generation.source}: eos_token_id {token_id} must lie in 0 … "
                f"{model.vocab_size - 1} (vocab_size - 1)"
            )
    of_tokenizer = [] if tokenizer is None else [tokenizer.eos_token_id]
    ids = [*model.eos_token_ids, *generation.eos_token_ids, *of_tokenizer]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))
