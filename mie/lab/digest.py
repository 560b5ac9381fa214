"""Digest the tokens and log-probabilities of fixed requests, to compare machines bit by bit."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mie.checkpoint.config import load_model_config
from mie.checkpoint.locate import locate_model
from mie.config.params.sampling import SamplingParams
from mie.errors import ConfigError
from mie.frontend.llm import LLM
from mie.frontend.outputs import LogprobRow, RequestOutput

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "1 thread": {"num_threads": 1, "max_num_batched_tokens": 512},
    "2 threads": {"num_threads": 2},
    "float32 weights": {"weight_dtype": "float32"},
    "int8 weights": {"quantization": "int8"},
    "int4 weights": {"quantization": "int4"},
    "int8 activations": {"activations": "int8"},
    "W4A8": {"quantization": "int4", "activations": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "int4 cache": {"kv_cache_dtype": "int4"},
}
"""The settings of each row. The requests of one row and of another are equal."""

NUM_TOKENS = 48
SHORT, LONG = 12, 120
"""Numbers of tokens of prompts, if the context of the model has room for them."""

COMMON: Mapping[str, Any] = {
    "num_threads": 2,
    "max_num_batched_tokens": 48,
    "num_blocks": 64,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
}
"""The settings of every row, unless the row has others. Prompts are computed in chunks of 48."""

SAMPLED: Mapping[str, Any] = {
    "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False, "logprobs": 5
}  # fmt: skip
REQUESTS: Sequence[tuple[int, SamplingParams]] = (
    (SHORT, SamplingParams(temperature=0, **SAMPLED)),
    (LONG, SamplingParams(temperature=0, prompt_logprobs=1, **SAMPLED)),
    (SHORT, SamplingParams(temperature=0.8, seed=1, top_p=0.95, **SAMPLED)),
    (
        LONG,
        SamplingParams(
            temperature=1.3, seed=2, min_p=0.02, top_k=50, repetition_penalty=1.1, **SAMPLED
        ),
    ),
)
"""The lengths of prompts, and the parameters."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The digests under some settings, in hexadecimal digits of SHA-256."""

    name: str
    alone: str = ""
    """The digest of the requests run one after another."""
    batch: str = ""
    """The digest of the requests run together."""
    refused: str = ""
    """The reason why the model cannot have these settings. Then there are no digests."""


def digest_rows(model: str, backend: str, names: Collection[str] = ()) -> Iterator[Row]:
    """Yield the rows with these names, or all.

    Raises:
        ConfigError: the backend cannot run here, or a name is unknown.
        ModelError: the model cannot be used.
    """
    if unknown := sorted({*names} - SETTINGS.keys()):
        known = ", ".join(map(repr, SETTINGS))
        raise ConfigError(f"no settings have the name {unknown[0]!r} (there are {known})")
    config = load_model_config(locate_model(model))
    length = min(LONG + NUM_TOKENS, config.context_length)
    prompts = [
        _prompt(min(wanted, length - NUM_TOKENS), config.vocab_size) for wanted, _ in REQUESTS
    ]
    params = [each for _, each in REQUESTS]
    for name, settings in SETTINGS.items():
        if names and name not in names:
            continue
        try:
            llm = LLM(model, backend=backend, max_model_len=length, **{**COMMON, **settings})
        except ConfigError as error:
            if not {"quantization", "activations"} & settings.keys():
                raise
            yield Row(name=name, refused=str(error))  # the file is quantised, or is not
            continue
        alone = [
            llm.generate(*each, use_tqdm=False)[0] for each in zip(prompts, params, strict=True)
        ]
        batch = llm.generate(prompts, params, use_tqdm=False)
        yield Row(name=name, alone=_digest(alone), batch=_digest(batch))


def digest_of(rows: Sequence[Row]) -> str:
    """Return one digest of all rows. Refused settings do not count."""
    found = [[row.name, row.alone, row.batch] for row in rows if not row.refused]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _prompt(length: int, vocab_size: int) -> dict[str, list[int]]:
    """Return token ids all over the vocabulary. No tokenizer is needed."""
    return {"prompt_token_ids": [(7919 * i * i + 31 * i + 5) % vocab_size for i in range(length)]}


def _digest(outputs: Sequence[RequestOutput]) -> str:
    facts = [
        [
            output.outputs[0].token_ids,
            [*map(_bits, output.prompt_logprobs or ())],
            [*map(_bits, output.outputs[0].logprobs or ())],
        ]
        for output in outputs
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _bits(row: LogprobRow | None) -> list[tuple[int, str, int | None]]:
    """Return the tokens of a row with every bit of their log-probabilities, and their ranks."""
    found = {} if row is None else row
    return [(token_id, each.logprob.hex(), each.rank) for token_id, each in found.items()]
