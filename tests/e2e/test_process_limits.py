"""Check that a model fits the limits that ``ulimit -v`` and ``ulimit -d`` set, or is refused."""

import pytest
from command_line import python

PROGRAM = """
import resource
import sys

from mie import LLM, SamplingParams
from mie.errors import RequestError, TooLittleMemoryError
from mie.base.resources import read_text

limit, use, spare = sys.argv[1], sys.argv[2], int(sys.argv[3]) << 20
status = dict(line.split(":", 1) for line in read_text("/proc/self/status").splitlines())
used = int(status[use].split()[0]) << 10
resource.setrlimit(getattr(resource, limit), (used + spare, used + spare))
params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
try:
    llm = LLM("bundled", use_tqdm_on_load=False)
    outputs = llm.generate(["Once upon a time " * 40] * 8, params, use_tqdm=False)
    print("answered", sum(len(output.outputs[0].token_ids) for output in outputs))
except (RequestError, TooLittleMemoryError) as error:
    print("refused:", error)
"""
ADDRESS_SPACE, DATA = ("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")


def answer(limit: tuple[str, str], spare: int) -> str:
    """Return the output of a program that may use ``spare`` MiB more than after its imports."""
    return python("-c", PROGRAM, *limit, str(spare), timeout=600).stdout


@pytest.mark.few
@pytest.mark.parametrize("limit", [ADDRESS_SPACE, DATA])
@pytest.mark.parametrize(
    "spare", [40, 430, *(pytest.param(n, marks=pytest.mark.slow) for n in (200, 800))]
)
def test_a_model_fits_a_limit_of_the_process_or_is_refused(limit, spare) -> None:
    text = answer(limit, spare)
    assert text == "answered 64\n" or text.startswith("refused: ")
    if spare > 500:
        assert text == "answered 64\n"


@pytest.mark.slow
@pytest.mark.parametrize("limit", [ADDRESS_SPACE, DATA])
def test_a_limit_never_ends_an_engine_that_has_loaded(limit: tuple[str, str]) -> None:
    texts = [answer(limit, spare) for spare in range(20, 520, 10)]
    assert {text.split()[0] for text in texts} == {"answered", "refused:"}
