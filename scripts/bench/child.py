"""Start an engine in a process of its own (engines.py), and ask it."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.engines import EngineSpec
from bench.harness import SCRIPTS, user_environment


class PeerError(Exception):
    """An engine cannot be measured. The message says why it is skipped."""


class Child:
    """An engine in its own process. The process is stopped (SIGSTOP) except during `generate`."""

    def __init__(self, spec: EngineSpec, python: str = sys.executable) -> None:
        """Start the process and wait until it has loaded or prepared the model.

        Raises:
            PeerError: it did not.
        """
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        command = [python, "-m", "bench.engines", json.dumps(asdict(spec))]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        pipes["stderr"] = self._stderr
        environment = user_environment()
        try:
            self._process: Any = subprocess.Popen(
                command, text=True, env=environment, cwd=SCRIPTS, **pipes
            )
        except OSError as error:
            self._stderr.close()
            raise PeerError(str(error)) from error
        try:
            self.facts = self._answer()
        except PeerError:
            self.close()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> dict[str, Any]:
        """Return tokens and times (see `Generated`), the call's seconds and the peak memory."""
        self._process.send_signal(signal.SIGCONT)
        try:
            request = {"prompts": prompts, "num_new_tokens": num_new_tokens}
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(self._ending()) from None
        self.facts |= (found := self._answer())
        return found

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _answer(self) -> dict[str, Any]:
        """Return the child's next line, and stop the child."""
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._ending())
        found: dict[str, Any] = json.loads(line)
        if "failed" in found:
            raise PeerError(found["failed"])
        self._process.send_signal(signal.SIGSTOP)
        return found

    def _ending(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        said = self._stderr.read().strip().splitlines()
        return f"its process ended with {code}" + (f": {said[-1]}" if said else "")
