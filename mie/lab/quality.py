"""Measure how well a model predicts a text, and how far rounded numbers move its predictions."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mie.checkpoint.config import load_model_config
from mie.checkpoint.locate import locate_model
from mie.config.engine_args import EngineArgs
from mie.config.params.sampling import SamplingParams
from mie.engine.engine import Engine
from mie.errors import ConfigError
from mie.lab.diff.recording import to_host
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops.backend import Array, Backend, StepBatch
from mie.text.tokenizer import Tokenizer

ROWS = 64
"""Number of rows of logits that become probabilities at a time."""

Logits = NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A model's predictions of a text, and their divergence from a reference in nats."""

    num_tokens: int
    """Predicted tokens: all of the text but the first of each window."""
    perplexity: float
    reference_perplexity: float | None = None
    mean_kl: float | None = None
    """The mean of KL(reference, model) over the predictions, and below, its 99th percentile."""
    p99_kl: float | None = None
    max_kl: float | None = None
    same_top: float | None = None
    """The share of predictions with the same most likely token as the reference."""


class _Tap:
    """A backend with a copy of the logits of each step, in the order of the tokens."""

    is_asynchronous = False

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.logits: list[Logits] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run_step(self, forward: Callable[[StepBatch], Array], batch: StepBatch) -> Array:
        logits = self._inner.run_step(forward, batch)
        rows = to_host(logits[: len(batch.logits_rows)])
        self.logits.append(rows[np.argsort(batch.logits_rows)])  # the sampled row is the first
        return logits


class Predictor:
    """A loaded model that returns its logits after each token of a sequence."""

    def __init__(self, args: EngineArgs, window: int) -> None:
        """Load the model for sequences of ``window`` tokens.

        Raises:
            ConfigError: a setting does not fit the model, or the window exceeds its context.
            ModelError: the model cannot be used.
        """
        taps: list[_Tap] = []

        def wrap(backend: Backend) -> Backend:
            taps.append(_Tap(backend))
            return cast(Backend, taps[0])  # it delegates the rest of the contract

        directory = locate_model(args.model)
        self.model = load_model_config(directory)
        if window > self.model.context_length:
            raise ConfigError(
                f"the window has {window} tokens; the model's context is "
                f"{self.model.context_length} (lower --window)"
            )
        settings = LoadSettings.of(args)
        config = replace(
            settings.engine,
            max_num_seqs=1,
            max_num_batched_tokens=window,
            max_model_len=window,
            enable_prefix_caching=False,
        )
        settings = replace(settings, engine=config)
        self._engine: Engine = load_engine(directory, settings, wrap=wrap)
        [self._tap] = taps

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Return the logits [len(token_ids) - 1, V] that predict each token but the first."""
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        self._tap.logits.clear()
        self._engine.add_request(token_ids[:-1], params, "window")
        while self._engine.has_work:
            self._engine.step()
        return np.concatenate(self._tap.logits)


def windows_of(args: EngineArgs, text: str, window: int, num_tokens: int) -> list[list[int]]:
    """Return the tokens of a text in windows. Each begins with BOS if the model's texts do.

    Raises:
        ConfigError: the text is too short.
        ModelError: the model or its tokenizer cannot be used.
    """
    if window < 2 or num_tokens < 2:
        raise ConfigError(f"a window and the text need 2 tokens; got {window} and {num_tokens}")
    directory = locate_model(args.model)
    tokenizer = Tokenizer.load(directory, load_model_config(directory).vocab_size)
    ids = tokenizer.encode(text)
    first = ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []
    ids = ids[len(first) :][:num_tokens]
    size = window - len(first)
    windows = [[*first, *ids[start : start + size]] for start in range(0, len(ids), size)]
    windows = [each for each in windows if len(each) > 1]
    if not windows:
        raise ConfigError(f"the text has {len(ids)} tokens; at least 2 are needed")
    return windows


def quality(
    windows: Sequence[Sequence[int]], model: Predictor, reference: Predictor | None
) -> Quality:
    """Compare a model's predictions with the text, and with the reference's."""
    losses: list[NDArray[np.float64]] = []
    others: list[NDArray[np.float64]] = []
    divergences: list[NDArray[np.float64]] = []
    same: list[NDArray[np.bool_]] = []
    if reference is not None and reference.model.vocab_size != model.model.vocab_size:
        raise ConfigError(
            f"the reference has {reference.model.vocab_size} tokens, the model "
            f"{model.model.vocab_size}; they must have the same vocabulary"
        )
    for window in windows:
        targets = np.asarray(window[1:])
        found = model.logits(window)
        wanted = None if reference is None else reference.logits(window)
        for rows in _slices(len(targets)):
            q, own = _log_softmax(found[rows]), (np.arange(len(targets[rows])), targets[rows])
            losses.append(-q[own])
            if wanted is not None:
                p = _log_softmax(wanted[rows])
                others.append(-p[own])
                divergences.append((np.exp(p) * (p - q)).sum(-1))
                same.append(p.argmax(-1) == q.argmax(-1))
    loss = np.concatenate(losses)
    result = Quality(num_tokens=len(loss), perplexity=math.exp(loss.mean()))
    if not divergences:
        return result
    divergence = np.concatenate(divergences)
    return replace(
        result,
        reference_perplexity=math.exp(np.concatenate(others).mean()),
        mean_kl=float(divergence.mean()),
        p99_kl=float(np.quantile(divergence, 0.99)),
        max_kl=float(divergence.max()),
        same_top=float(np.concatenate(same).mean()),
    )


def _slices(number: int) -> Iterator[slice]:
    return (slice(start, start + ROWS) for start in range(0, number, ROWS))


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide
