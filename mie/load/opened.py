"""Open a model: its configuration, and its weights in the forms of the settings.

Only headers of the weights are read, so a model that cannot be used costs no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mie.checkpoint.changed import rounded
from mie.checkpoint.config import load_model_config
from mie.checkpoint.gguf.header import GgufHeader, opened
from mie.checkpoint.tensors import expected_tensors
from mie.checkpoint.weights import Checkpoint, RandomWeights
from mie.errors import ConfigError, shown
from mie.load.settings import LoadSettings
from mie.model.config import ModelConfig
from mie.ops.weights.quantised import Form
from mie.ranks.share import Share, check_divides

ROUNDED: dict[str, Form] = {
    "int8": Form(codes="int8", group=32, has_offsets=False),
    "int4": Form(codes="int4", group=32, has_offsets=False),
}
"""The forms that matrices of floats can be rounded to."""

METHODS = {"gptq_marlin": "gptq", "awq_marlin": "awq", "auto_awq": "awq"}
"""Formats of files by the names of vLLM's kernels for them."""

HEADS = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenedModel:
    """A model after its configuration is read and its weights are checked by their headers."""

    config: ModelConfig
    weights: Checkpoint
    share: Share | None = None
    """The part of the model that a rank has, or None if there are no ranks."""
    whole: ModelConfig | None = None
    """The configuration of the whole model, if ``config`` has the sizes of a part."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """The forms of quantised tensors by name. All others are floats."""
        return self.weights.forms

    @property
    def widest_dtype(self) -> str:
        """The widest dtype of the matrices of floats."""
        dtypes = self.weights.matrix_dtypes
        return dtypes.pop() if len(dtypes) == 1 else "float32"


def open_model(
    directory: Path | GgufHeader,
    settings: LoadSettings,
    config: ModelConfig | None = None,
    rank: int = 0,
) -> OpenedModel:
    """Open the model in a directory, or a GGUF file, or of its header.

    ``config`` replaces the file's. With ``tensor_parallel_size``, the result is the part of a rank.

    Raises:
        ConfigError: a setting does not fit the weights.
        ModelError: the model cannot be used.
    """
    directory = opened(directory)
    config = config or load_model_config(directory)
    if settings.load_format == "dummy":
        weights: Checkpoint = RandomWeights(config, settings.engine.seed)
    else:
        weights = Checkpoint.open(directory, expected_tensors(config), config.quantisation)
    weights = quantised(weights, config, settings.quantization, settings.head_dtype)
    if settings.engine.activations == "int8":
        check_has_integers(weights.forms, config)
    if settings.tensor_parallel_size == 1:
        return OpenedModel(config=config, weights=weights)
    check_divides(config, settings.tensor_parallel_size)
    share = Share(rank, settings.tensor_parallel_size)
    own = share.config(config), share.checkpoint(weights, config)
    return OpenedModel(config=own[0], weights=own[1], share=share, whole=config)


def check_has_integers(forms: Mapping[str, Form], model: ModelConfig) -> None:
    """Raise `ConfigError` if no product of the model has int4 or int8 weights."""
    only_rows = () if model.tie_word_embeddings else HEADS[:1]
    if not any(f.codes in ROUNDED for name, f in forms.items() if name not in only_rows):
        raise ConfigError(
            "activations is 'int8'; the model has no matrix of int4 or int8 for their products "
            "(add quantization='int8' or 'int4' to round weights in 16 or 32 bits, or leave it out)"
        )


def quantised(
    weights: Checkpoint, model: ModelConfig, quantization: str | None, head_dtype: str
) -> Checkpoint:
    """Return the weights in the forms of the settings.

    ``quantization`` "int8" or "int4" rounds all matrices of floats. Any other value must be the
    format of the files. ``head_dtype`` has the form of the embeddings and of the output head. For
    ``head_dtype``, "auto" is "int8" if the other matrices are rounded, and else "file", so that
    they stay as they are.

    Raises:
        ConfigError: the files have another format, or a matrix to be rounded is quantised already.
    """
    declared = model.quantisation.method if model.quantisation else None
    if weights.forms and declared is None:
        declared = "gguf"  # the other files declare theirs
    method = METHODS.get(quantization or "", quantization)
    if method not in (None, declared, *ROUNDED):
        of_file = f"are {declared}" if declared else "are not quantised"
        raise ConfigError(
            f"quantization is {shown(quantization)}; the files {of_file} (leave it out, or choose "
            f"{' or '.join(map(repr, ROUNDED))} to round weights in 16 or 32 bits)"
        )
    forms = rounded_forms(model, quantization, head_dtype)
    twice = next((name for name in forms if name in weights.forms), None)
    if twice is not None:
        asked = "head_dtype" if twice in HEADS and head_dtype != "auto" else "quantization"
        raise ConfigError(
            f"{asked} asks for {forms[twice]}; {twice} is {weights.forms[twice]} in the files "
            "already (leave it out)"
        )
    return rounded(weights, forms) if forms else weights


def rounded_forms(
    model: ModelConfig, quantization: str | None, head_dtype: str = "auto"
) -> dict[str, Form]:
    """Return the forms of the matrices that these settings round.

    Routers are small, and a rounding could change the experts that they choose. They are left.
    """
    of_layers = ROUNDED.get(quantization or "")
    of_heads = ROUNDED["int8"] if head_dtype == "auto" and of_layers else ROUNDED.get(head_dtype)
    forms: dict[str, Form] = {}
    for name, shape in expected_tensors(model).items():
        form = of_heads if name in HEADS else of_layers
        is_router = name.endswith(f".{model.names.router}.weight")
        if form is not None and len(shape) == 2 and not is_router:
            forms[name] = form
    return forms
