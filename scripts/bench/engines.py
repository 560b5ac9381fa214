"""Run an engine in its own process: mie, transformers, llama.cpp, ik_llama.cpp, or CTranslate2.

    python -m bench.engines SPEC          in scripts/

SPEC is an `EngineSpec` as a JSON object. With "prepare", the child converts the model to the
engine's own format and exits. Otherwise it loads the model and answers each line of stdin (a
request) with a line on stdout. The first line is "ready". A line "failed" gives a reason and is the
last one. child.py is the parent's side.

Only `MieEngine` imports mie, and each peer is imported only in its own class, because each may run
under another interpreter.
"""

import ctypes
import importlib.metadata
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from bench.harness import peak_bytes

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
GGUF_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15}
"""Types of quantised files that mie and llama.cpp both read, and llama.cpp's numbers for them."""
FILE = "file"
"""The kind of a published GGUF file that engines read as it is."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The engine and the model that a child loads."""

    family: str
    """The engine's name in `ENGINES`."""
    kind: str
    """The dtype as the family spells it, such as "f32", or one of `GGUF_TYPES`, or `FILE`."""
    directory: str
    """The directory of the model, or the path of a `FILE`."""
    max_num_seqs: int
    max_model_len: int
    threads: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of mie."""
    device: str = "cpu"
    """torch's name of the device."""
    prepare: bool = False

    @property
    def converted(self) -> str:
        """The path that `Engine.prepare` writes, or the file that needs no preparation."""
        if self.kind == FILE:
            return self.directory
        suffix = ".gguf" if self.family == "llama.cpp" or self.kind in GGUF_TYPES else ""
        return f"{self.directory}/{self.kind}{suffix}"


class Generated(dict[str, Any]):
    """The new "tokens" of each prompt, and the "times" of each, in seconds since the start."""


class Engine(Protocol):
    """A loaded model."""

    version: str
    """The engine's version, and the mode it runs in."""

    def __init__(self, spec: EngineSpec) -> None: ...

    @staticmethod
    def prepare(spec: EngineSpec) -> None:
        """Write ``spec.converted`` if the engine does not read the model's own format."""

    def generate(self, prompts: list[list[int]], num_new_tokens: int) -> Generated:
        """Generate for all prompts at once. They have one length. No token ends a prompt."""

    def peak_bytes(self) -> int | None:
        """Return the peak memory of the process, or the GPU memory that the engine holds."""


class MieEngine:
    """The engine mie, called through `LLM.add_request` and `LLM.step` as `LLM.generate` does."""

    def __init__(self, spec: EngineSpec) -> None:
        import mie
        from mie.ops.blas import numpy_facts

        given: dict[str, Any] = {
            "dtype": "float32",
            "max_num_seqs": spec.max_num_seqs,
            "max_model_len": spec.max_model_len,
            "enable_prefix_caching": False,
        }
        path = spec.converted if spec.kind in (*GGUF_TYPES, FILE) else spec.directory
        llm = mie.LLM(path, skip_tokenizer_init=True, **(given | spec.settings))
        self._llm, self._backend = llm, spec.settings.get("backend", "auto")
        numpy = "NumPy {version} ({blas} {blas_version})".format(**numpy_facts())
        settings = (f"{name}={value}" for name, value in spec.settings.items())
        self.version = ", ".join([f"mie {mie.__version__}", numpy, *settings])

    @staticmethod
    def prepare(spec: EngineSpec) -> None:
        """Do nothing. mie reads the model as it is, and quantised files that llama.cpp wrote."""

    def generate(self, prompts: list[list[int]], num_new_tokens: int) -> Generated:
        """Generate with continuous batching."""
        from mie import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
        start = time.perf_counter()
        ids = [self._llm.add_request({"prompt_token_ids": each}, params) for each in prompts]
        tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
        times: dict[str, list[float]] = {request_id: [] for request_id in ids}
        while self._llm.has_work:
            outputs = self._llm.step()
            now = time.perf_counter() - start
            for output in outputs:
                token_ids = output.outputs[0].token_ids
                times[output.request_id] += [now] * (len(token_ids) - len(times[output.request_id]))
                tokens[output.request_id] = token_ids
        return Generated(tokens=[list(tokens[each]) for each in ids], times=[times[i] for i in ids])

    def peak_bytes(self) -> int | None:
        """Return the process's peak, or the size of CuPy's pool. The pool gives nothing back."""
        if self._backend != "cupy":
            return peak_bytes()
        import cupy

        return int(cupy.get_default_memory_pool().total_bytes())


class TransformersEngine:
    """The engine transformers: `generate` runs several prompts as one static batch."""

    def __init__(self, spec: EngineSpec) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(spec.threads)
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[spec.kind]
        model = AutoModelForCausalLM.from_pretrained(spec.directory, dtype=dtype)
        self._model, self._device = model.to(spec.device).eval(), spec.device
        self._model.generation_config.eos_token_id = None
        version = importlib.metadata.version("transformers")
        self.version = f"transformers {version}, torch {torch.__version__}"

    @staticmethod
    def prepare(spec: EngineSpec) -> None:
        """Do nothing, because transformers reads the model as it is."""

    def generate(self, prompts: list[list[int]], num_new_tokens: int) -> Generated:
        """Generate for one static batch."""
        import torch

        ids = torch.tensor(prompts, device=self._device)
        clock = _StepClock()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_new_tokens,
                pad_token_id=0,
                streamer=clock,
            )
        tokens = output[:, ids.shape[1] :].tolist()
        return Generated(tokens=tokens, times=[clock.times] * len(prompts))

    def peak_bytes(self) -> int | None:
        """Return the process's peak, or the peak of torch's memory on the device."""
        import torch

        is_cpu = self._device == "cpu"
        return peak_bytes() if is_cpu else int(torch.cuda.max_memory_allocated())


class _StepClock:
    """A streamer for `generate`. It receives the prompt and then the tokens of each step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._is_prompt = True
        self.times: list[float] = []

    def put(self, tokens: object) -> None:
        """Note the time of a step."""
        if not self._is_prompt:
            self.times.append(time.perf_counter() - self._start)
        self._is_prompt = False

    def end(self) -> None:
        """Do nothing at the end."""


class LlamaCppEngine:
    """The engine llama.cpp through its batch API, with the library's own settings.

    Prompts run in batches of up to n_batch tokens, then each step computes the next token of all.
    NumPy takes the largest logit. The context is just large enough for the workload.
    """

    def __init__(self, spec: EngineSpec) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self._threads = spec.threads
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        path = spec.converted.encode()
        self._model = llama_cpp.llama_model_load_from_file(
            path, llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {spec.converted}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._context: Any = None
        self._batch: Any = None
        self._context_size = (0, 0)
        system = llama_cpp.llama_print_system_info().decode()
        features = " ".join(re.findall(r"(\w+) = 1", system))
        self.version = f"llama-cpp-python {llama_cpp.__version__} ({features})"

    @staticmethod
    def prepare(spec: EngineSpec) -> None:
        """Write the GGUF file. llama.cpp itself quantises it from F32."""
        import llama_cpp

        from bench.gguf_file import write_gguf

        if Path(spec.converted).exists():  # for another engine
            return
        if spec.kind not in GGUF_TYPES:
            write_gguf(Path(spec.directory), Path(spec.converted), spec.kind)
            return
        plain = replace(spec, family="llama.cpp", kind="F32")
        LlamaCppEngine.prepare(plain)
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = GGUF_TYPES[spec.kind]
        paths = (plain.converted.encode(), spec.converted.encode())
        if llama_cpp.llama_model_quantize(*paths, ctypes.byref(options)):
            raise RuntimeError(f"llama.cpp cannot write {spec.converted}")

    def generate(self, prompts: list[list[int]], num_new_tokens: int) -> Generated:
        """Generate for one static batch."""
        # A context is shared out evenly, and each share has a multiple of 256 tokens.
        num_tokens = -(-(len(prompts[0]) + num_new_tokens) // 256) * 256
        self._set_context(len(prompts), len(prompts) * num_tokens)
        self._clear()
        tokens: list[list[int]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        last = len(prompts[0]) - 1
        rows = [
            (token, position, seq, position == last)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        start = time.perf_counter()
        for number in range(num_new_tokens):
            for begin in range(0, len(rows), self._n_batch):
                for seq, token in self._decode(rows[begin : begin + self._n_batch]):
                    tokens[seq].append(token)
                    times[seq].append(time.perf_counter() - start)
            rows = [(each[-1], last + 1 + number, seq, True) for seq, each in enumerate(tokens)]
        return Generated(tokens=tokens, times=times)

    def peak_bytes(self) -> int | None:
        """Return the peak memory of the process."""
        return peak_bytes()

    def _choose(self, params: Any) -> None:
        """Change settings of a context. llama.cpp keeps the library's own."""

    def _clear(self) -> None:
        """Forget the tokens of all sequences."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)

    def _logits(self, indices: list[int]) -> Any:
        """Return the logits of the rows that want logits, [len(indices), vocabulary]."""
        import numpy as np

        pointer = self._lib.llama_get_logits(self._context)  # they follow each other
        return np.ctypeslib.as_array(pointer, (len(indices), self._vocab_size))

    def _set_context(self, num_seqs: int, num_tokens: int) -> None:
        if self._context_size == (num_seqs, num_tokens):
            return
        if self._context is not None:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._context)
        params = self._lib.llama_context_default_params()
        params.n_seq_max, params.n_ctx = num_seqs, num_tokens
        params.n_threads = params.n_threads_batch = self._threads
        self._choose(params)
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot create a context")
        self._context_size = (num_seqs, num_tokens)
        self._n_batch = params.n_batch
        self._batch = self._lib.llama_batch_init(params.n_batch, 0, 1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Return (sequence, next token) for the rows that want one."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq, wants_logits) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = wants_logits
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {len(rows)} tokens")
        indices = [i for i, row in enumerate(rows) if row[3]]
        if not indices:
            return []
        tokens = self._logits(indices).argmax(axis=-1).tolist()
        return [(rows[i][2], token) for i, token in zip(indices, tokens, strict=True)]


class IkLlamaCppEngine(LlamaCppEngine):
    """The engine ik_llama.cpp through its batch API, from the wheel ik-llama-cpp-python 0.1.5.

    The wheel is built for AVX2. It has the batch API in a private module only. Its flash attention
    aborts with several sequences in a batch ("GGML_ASSERT(S > 0) failed"), so it is for one only.
    """

    def __init__(self, spec: EngineSpec) -> None:
        from ik_llama_cpp import _ctypes_api as lib

        self._lib, self._threads = lib, spec.threads
        lib.llama_backend_init()
        path = spec.converted.encode()
        self._model = lib.llama_model_load_from_file(path, lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"ik_llama.cpp cannot load {spec.converted}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._context = self._batch = None
        self._context_size = (0, 0)
        self.version = f"ik-llama-cpp-python {importlib.metadata.version('ik-llama-cpp-python')}"

    @staticmethod
    def prepare(spec: EngineSpec) -> None:
        """Do nothing, because the engine reads published files only."""

    def _choose(self, params: Any) -> None:
        params.flash_attn = params.n_seq_max == 1

    def _clear(self) -> None:
        self._lib.llama_kv_cache_clear(self._context)

    def _logits(self, indices: list[int]) -> Any:
        import numpy as np

        pointers = [self._lib.llama_get_logits_ith(self._context, i) for i in indices]
        return np.stack([np.ctypeslib.as_array(each, (self._vocab_size,)) for each in pointers])


class CTranslate2Engine:
    """The engine CTranslate2: `Generator.generate_batch` runs one static batch."""

    def __init__(self, spec: EngineSpec) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(
            spec.converted,
            device="cpu",
            compute_type=spec.kind,
            inter_threads=1,
            intra_threads=spec.threads,
        )
        self._words = json.loads((Path(spec.converted) / "vocabulary.json").read_text())
        self.version = f"ctranslate2 {ctranslate2.__version__} ({self._generator.compute_type})"

    @staticmethod
    def prepare(spec: EngineSpec) -> None:
        """Convert the model with CTranslate2's own converter."""
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(spec.directory).convert(spec.converted, quantization=spec.kind)

    def generate(self, prompts: list[list[int]], num_new_tokens: int) -> Generated:
        """Generate for one static batch."""
        times: list[list[float]] = [[] for _ in prompts]
        start = time.perf_counter()

        def note(result: Any) -> bool:
            times[result.batch_id].append(time.perf_counter() - start)
            return False

        results = self._generator.generate_batch(
            [[self._words[token] for token in prompt] for prompt in prompts],
            sampling_topk=1,
            min_length=num_new_tokens,
            max_length=num_new_tokens,
            include_prompt_in_result=False,
            callback=note,
        )
        return Generated(tokens=[list(each.sequences_ids[0]) for each in results], times=times)

    def peak_bytes(self) -> int | None:
        """Return the peak memory of the process."""
        return peak_bytes()


ENGINES: dict[str, type[Engine]] = {
    "mie": MieEngine,
    "transformers": TransformersEngine,
    "llama.cpp": LlamaCppEngine,
    "ik_llama.cpp": IkLlamaCppEngine,
    "ctranslate2": CTranslate2Engine,
}


# The child process.


def answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's tokens for a request, as JSON data."""
    prompts, num_new_tokens = request["prompts"], request["num_new_tokens"]
    start = time.perf_counter()
    result = engine.generate(prompts, num_new_tokens)
    seconds = time.perf_counter() - start
    for name in ("tokens", "times"):
        got = [len(each) for each in result[name]]
        if got != [num_new_tokens] * len(prompts):
            raise RuntimeError(f"asked for {num_new_tokens} new tokens a prompt; got {set(got)}")
    return {**result, "seconds": seconds, "peak_bytes": engine.peak_bytes()}


def serve(spec: EngineSpec, say: Callable[[dict[str, Any]], None]) -> None:
    """Load the engine, then answer requests until stdin ends."""
    engine_class = ENGINES[spec.family]
    if spec.prepare:
        engine_class.prepare(spec)
        say({"ready": spec.converted})
        return
    start = time.perf_counter()
    engine = engine_class(spec)
    seconds = time.perf_counter() - start
    say({"ready": engine.version, "load_seconds": seconds, "peak_bytes": engine.peak_bytes()})
    for line in sys.stdin:
        say(answer(engine, json.loads(line)))


def main() -> None:
    """Answer on the original stdout, and send the output of libraries to stderr."""
    # A child that is stopped would outlive a parent that was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=stdout, flush=True)

    try:
        serve(EngineSpec(**json.loads(sys.argv[1])), say)
    except Exception as error:  # any error of a peer is the reason to skip it
        say({"failed": f"{type(error).__name__}: {error}".splitlines()[0]})


if __name__ == "__main__":
    main()
