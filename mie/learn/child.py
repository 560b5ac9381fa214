"""Try a learner's file in this process. `mie.learn.check` starts and ends it."""

import io
import json
import resource
import signal
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from mie.learn.exercises import exercise_of
from mie.learn.trial import Late, Steps, Verdict, failure, try_out

MAX_BYTES = 4 << 30
"""Address space of the process. An endless list must not take the memory of the machine."""
MAX_PRINTED = 4000
"""Maximum number of characters of a learner's own output that are kept."""


class _Printed(io.StringIO):
    """The beginning of the output."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, MAX_PRINTED - self.tell())])
        return len(text)


def main(path: str, timeout: str) -> None:
    """Print the verdict about a file as JSON. A trial ends after ``timeout`` seconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [each for each in (MAX_BYTES, soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    printed = _Printed()
    with redirect_stdout(printed):
        verdict = _verdict(path, float(timeout))
    json.dump({**asdict(verdict), "printed": printed.getvalue()}, sys.stdout)


def _verdict(path: str, timeout: float) -> Verdict:
    exercise = exercise_of(path)
    try:
        source = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return Verdict(lines=[f"{exercise.name} is not UTF-8: {error.reason} at {error.start}."])
    sys.path.append(str(Path(path).parent))  # modules of the learner's own
    signal.signal(signal.SIGALRM, _raise_late)
    try:
        steps = Steps()
        signal.setitimer(signal.ITIMER_REAL, timeout)
        verdict = try_out(steps, exercise, source, path)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Late as late:
        seen = f"{exercise.name} is still computing after {timeout:g} s. It was here:"
        must = "A loop that does not end has a condition that nothing inside the loop changes."
        return Verdict(False, "no end", [seen, *failure(late, path)[:-1], must])
    except SystemExit as end:
        return Verdict(lines=[f"{exercise.name} ends Python.", *failure(end, path)])
    return verdict


def _raise_late(number: int, frame: FrameType | None) -> None:
    raise Late
