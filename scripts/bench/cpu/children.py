"""Run the engines of bench_cpu.py in processes that are stopped while they are not measured."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.cpu.engines import EngineSpec

SCRIPTS = Path(__file__).resolve().parents[2]
TUNING = re.compile("OPENBLAS_|MKL_|OMP_|GOMP_|KMP_|GOTO_|BLIS_|ONEDNN_|DNNL_|CT2_|ATEN_|GGML_")
WITHOUT_AVX512 = {
    "OPENBLAS_CORETYPE": "Haswell",  # mie
    "ATEN_CPU_CAPABILITY": "avx2",  # transformers: PyTorch, oneDNN and MKL
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "CT2_FORCE_CPU_ISA": "AVX2",  # CTranslate2
}


def child_environment(without_avx512: bool) -> dict[str, str]:
    """Return the environment of a user, without variables that tune a library."""
    kept = {name: value for name, value in os.environ.items() if not TUNING.match(name)}
    return {**kept, **(WITHOUT_AVX512 if without_avx512 else {})}


class PeerError(Exception):
    """An engine cannot be measured. The message says why it is skipped."""


class Child:
    """An engine in its own process, which runs only during a call of `generate`."""

    def __init__(self, python: str, spec: EngineSpec, environment: Mapping[str, str]) -> None:
        """Start the process and wait until it has loaded the model.

        Raises:
            PeerError: it did not load.
        """
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        try:
            self._process = subprocess.Popen(
                [python, "-m", "bench.cpu.child", json.dumps(asdict(spec))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=dict(environment),
                cwd=SCRIPTS,
            )
        except OSError as error:
            self._stderr.close()
            raise PeerError(str(error)) from error
        try:
            ready = self._answer()
        except PeerError:
            self.close()
            raise
        self.version: str = ready["ready"]
        self.load_seconds: float = ready.get("load_seconds", 0.0)
        self.peak_bytes: int = ready.get("peak_bytes", 0)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_new_tokens: int, one_by_one: bool = False
    ) -> dict[str, Any]:
        """Return tokens, times, steps (see `engines.Generated`) and the seconds of the call."""
        self._process.send_signal(signal.SIGCONT)
        request = {"prompts": prompts, "num_new_tokens": num_new_tokens, "one_by_one": one_by_one}
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(self._ending()) from None
        answer = self._answer()
        self.peak_bytes = answer["peak_bytes"]
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _answer(self) -> dict[str, Any]:
        """Return the child's next line, and stop the child."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._ending())
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise PeerError(answer["failed"])
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def _ending(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().strip().splitlines()
        return f"its process ended with {code}" + (f": {said[-1]}" if said else "")


def prepare(python: str, spec: EngineSpec, environment: Mapping[str, str]) -> None:
    """Convert the model to the engine's own format.

    Raises:
        PeerError: the conversion failed.
    """
    Child(python, replace(spec, prepare=True), environment).close()
